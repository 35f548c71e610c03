"""Positions: rotary embedding as pure math.

- `rotary`: cos and sin of positions, and the models' ways to rotate
- `splice`: which tokens survive a truncation, and where they land
"""
