"""A HuggingFace GPT-2, small and random, with a loss over tokens inside the model. "# +": added by hvdtrain.

    pip install transformers
    horovodrun -np 2 python examples/gpt2.py

Batches are dicts, as HuggingFace's collators give them. The model's own loss is a mean over labels that are not -100,
of which it leaves out each sentence's first: that is the weight.
"""

import torch
from torch.utils import data
from transformers import GPT2Config, GPT2LMHeadModel

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH, WORDS = 2, 16, 40

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)


class Counting(data.Dataset):
    """Sentences that count on from a number in steps of one to three, padded to 12 words."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        length = 6 + index % 7
        words = (index + torch.arange(12) * (1 + index % 3)) % WORDS
        present = torch.arange(12) < length
        return {"input_ids": words, "attention_mask": present.long(), "labels": torch.where(present, words, -100)}


sizes = {"vocab_size": WORDS, "n_positions": 12, "n_embd": 32, "n_layer": 2, "n_head": 2}
dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # draws are each rank's own
config = GPT2Config(**sizes, **dropout, bos_token_id=None, eos_token_id=None)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train = Counting()
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +

model.train()
for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        tokens = (batch["labels"][:, 1:] != -100).sum()  # +
        optimizer.backward(loss, weight=tokens)  # + instead of: loss.backward()
        optimizer.step()
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: loss {loss:.4f} a token")
