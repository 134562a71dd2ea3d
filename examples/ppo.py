"""PPO on a toy: four passes over each batch, one optimizer for actor and critic. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/ppo.py

The task has one step: of four actions the right one depends on the state. The randomness of an action (Gumbel noise)
comes with its state, so that any number of ranks gives one result. Each rank acts in its own part of the states.
"""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH, PASSES, CLIP = 4, 128, 4, 0.2

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)
states = torch.randn(1000, 6)
right = (states @ torch.randn(6, 4)).argmax(1)
gumbel = -torch.empty(1000, 4).exponential_().log()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, state):
        features = self.body(state)
        return self.actor(features), self.critic(features)[:, 0]


model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
train = data.TensorDataset(states, right, gumbel)
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for state, best, chance in loader:
        with torch.no_grad():
            logits, value = model(state)
            action = (logits + chance).argmax(1)
            reward = (action == best).to(value.dtype)
            advantage, before = reward - value, Categorical(logits=logits).log_prob(action)
        for _ in range(PASSES):
            logits, value = model(state)
            policy = Categorical(logits=logits)
            ratio = (policy.log_prob(action) - before).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            loss = (-gain + 0.5 * (reward - value) ** 2 - 0.01 * policy.entropy()).mean()
            optimizer.zero_grad()
            optimizer.backward(loss)  # + instead of: loss.backward()
            optimizer.step()
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: reward {reward.mean():.3f}, loss {loss:.4f}")
