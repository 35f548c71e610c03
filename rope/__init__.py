"""Positions: rotary embedding as pure math."""
