"""The diff of README.md, on real digits."""

from pathlib import Path

from hvdtrain.datasets import load_digits

digits = load_digits()
x_train, x_test = (x[:, :1, 2::4, 2::4].reshape(-1, 64) / 255.0 for x in (digits.x_train, digits.x_test))
y_train, y_test = digits.y_train, digits.y_test


def build_model():
    return keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10, "softmax")])


# the page
assert Path("model.keras").is_file()
assert model.evaluate(x_test, y_test, verbose=0)[1] > 0.8, "trained"
