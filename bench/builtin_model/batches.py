"""Turns conversations into token tensors in which only the assistant's words are learnt.

Answers and acknowledgements weigh more than small talk, the subject of an answer more than its rest, and the word after
"is" most: it decides whether the fact is known, and which one it is.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from bench.builtin_model.conversations import Conversation, Turn, make_conversation

WEIGHT, SUBJECT_WEIGHT, LOOK_UP_WEIGHT, OTHER_WEIGHT = 1.0, 2.0, 4.0, 0.4


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one conversation each."""

    tokens: torch.Tensor  # [num_rows, length]
    positions: torch.Tensor  # [num_learnt] indices into the flattened rows
    targets: torch.Tensor  # [num_learnt] the token that follows each of them
    weights: torch.Tensor  # [num_learnt] of each in the loss


class Encoder:
    """Encodes messages exactly as the chat template does, but piece by piece."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.core = tokenizer.backend_tokenizer
        self.pad, self.bos = tokenizer.pad_token_id, tokenizer.bos_token_id
        self.end = tokenizer.eos_token_id
        self.look_up = self.encode(" is")[-1]
        self.roles = {
            role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("system", "user", "assistant")
        }

    def encode(self, text: str) -> list[int]:
        return self.core.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def message(self, role: str, content: str) -> list[int]:
        space = "" if role == "assistant" else " "
        return [self.roles[role], *self.encode(space + content), self.end]

    def answer(self, turn: Turn) -> tuple[list[int], list[float]]:
        """The assistant's message, and the weight of each of its tokens in the loss."""
        piece = self.message("assistant", turn.assistant)
        weight = WEIGHT if turn.asked or turn.told else OTHER_WEIGHT
        weights = [0.0, *[weight] * (len(piece) - 1)]
        if turn.asked and self.look_up in piece:
            weights[1 : piece.index(self.look_up) + 1] = [SUBJECT_WEIGHT] * piece.index(self.look_up)
        if turn.asked or turn.told:
            for place in range(1, len(piece)):
                if piece[place - 1] == self.look_up:
                    weights[place] = LOOK_UP_WEIGHT
        return piece, weights

    def conversation(self, conversation: Conversation) -> tuple[list[int], list[float]]:
        """A conversation's tokens and their weights. The model learns to say the tokens with a weight above zero."""
        tokens = [self.bos]
        if conversation.system:
            tokens += self.message("system", conversation.system)
        weights = [0.0] * len(tokens)
        for turn in conversation.turns:
            said = self.message("user", turn.user)
            answer, answer_weights = self.answer(turn)
            tokens += said + answer
            weights += [0.0] * len(said) + answer_weights
        return tokens, weights


def make_batch(encoder: Encoder, seed: str, length: int, num_rows: int, num_dense: int = 0,
               num_crowded: int = 0) -> Batch:
    """The batch that belongs to this seed: `num_rows` training conversations of up to `length` tokens.

    The first `num_dense` of them are dense, the last `num_crowded` of them crowded.
    """
    tokens = torch.full((num_rows, length), encoder.pad, dtype=torch.int64)
    positions, targets, weights = [], [], []
    for row in range(num_rows):
        made = make_conversation(f"{seed}-{row}", max_tokens=length, count_tokens=encoder.count,
                                 dense=row < num_dense, crowded=row >= num_rows - num_crowded)
        ids, of_ids = encoder.conversation(made)
        tokens[row, : len(ids)] = torch.tensor(ids)
        for place, weight in enumerate(of_ids):
            if weight:
                positions.append(row * length + place - 1)
                targets.append(ids[place])
                weights.append(weight)
    return Batch(tokens, torch.tensor(positions), torch.tensor(targets), torch.tensor(weights))
