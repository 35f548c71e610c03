"""Positions: rotary embedding as pure math.

- `rotary`: cos and sin of positions, and how models rotate with them
- `splice`: which tokens survive a truncation, and where they go

Decisions:

Models differ in which elements they pair and in how they round, but a loaded key must equal a computed one bit for bit.
So rotation here rounds as the model's own code does, in the style that the probe has found for the layer at load.
"""
