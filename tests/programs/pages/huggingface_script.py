"""The diff of docs/how-huggingface.md, on real digits."""

import tempfile

import torch
import transformers

from hvdtrain.datasets import load_digits

digits = load_digits()
dataset, validation = (
    [{"pixel_values": torch.from_numpy(x[:1]).float() / 255, "labels": int(y)} for x, y in zip(xs, ys, strict=True)]
    for xs, ys in ((digits.x_train, digits.y_train), (digits.x_test, digits.y_test))
)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
model = transformers.ViTForImageClassification(
    transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_channels=1, num_labels=10)
)
folder = tempfile.mkdtemp()


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean()), "samples": len(found.label_ids)}


# the page
metrics = trainer.evaluate()
assert metrics["eval_samples"] == len(validation) and metrics["eval_accuracy"] > 0.3, metrics
