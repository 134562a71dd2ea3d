"""Sequence to sequence, with the mean over target tokens that are no padding. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/seq2seq.py

Ranks have as many sentences and not as many tokens: the weight says what the loss divides by. Left out, the first
update is refused, with what to write.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH, WORDS, PAD, BEGIN = 3, 32, 20, 0, 1

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)
sentences = [torch.randint(2, WORDS, (int(length),)) for length in torch.randint(2, 9, (300,))]
pairs = [(words, words.flip(0)) for words in sentences]  # to be reversed


def collate(rows):
    source, target = (
        pad_sequence(list(column), batch_first=True, padding_value=PAD) for column in zip(*rows, strict=True)
    )
    return source, target


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 32, padding_idx=PAD)
        self.encoder, self.decoder = nn.GRU(32, 64, batch_first=True), nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, WORDS)

    def forward(self, source, target):
        lengths = (source != PAD).sum(1)
        states, _ = self.encoder(self.words(source))
        last = states[torch.arange(len(source)), lengths - 1]
        begun = torch.cat([torch.full((len(target), 1), BEGIN), target[:, :-1]], 1)
        return self.out(self.decoder(self.words(begun), last[None])[0])


model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
mine = hvt.loader(pairs, BATCH // world.size, shuffle=False, collate=collate)  # +
loader = mine  # + instead of: loader = torch.utils.data.DataLoader(pairs, BATCH, collate_fn=collate)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for source, target in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(source, target).flatten(0, 1), target.flatten(), ignore_index=PAD)
        optimizer.backward(loss, weight=(target != PAD).sum())  # + instead of: loss.backward()
        optimizer.clip_grad_norm_(1.0)  # + instead of: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: loss {loss:.4f} a token")
