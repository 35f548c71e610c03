"""Positions: rotary embedding as pure math.

- `rotary`: cos and sin of positions, and the models' ways to rotate
- `splice`: which tokens survive a truncation, and where they land

Decisions:

Models differ in which elements they pair and in how they round, and what is loaded is compared with what was computed
by `torch.equal`. So rotation here rounds as the model's own code does, in the style that the probe at load found for
the layer.
"""
