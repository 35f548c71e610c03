"""Trains the built-in model's tokenizer: byte-level BPE on the phrasings, with values random.

Training text has mostly invented values. So a held-out real name is spelled in the same small pieces as the names of
the training set, and the model can copy it, too.
"""

import argparse
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.builtin_model.conversations import make_conversation
from kvstore.engine.builtin import MODEL_DIR

VOCAB_SIZE = 1280
WINDOW = 1024
SPECIAL = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
# The template is written by hand. With a space before a person's text, a first word has the same pieces as a later one.
# Every message is rendered by itself, so a longer chat always begins with the shorter one.
TEMPLATE = (MODEL_DIR / "chat_template.jinja").read_text()


def corpus(num_conversations: int) -> list[str]:
    """Messages of training conversations, as the template will show them to the tokenizer."""
    texts = []
    for seed in range(num_conversations):
        made = make_conversation(f"tokenizer-{seed}", max_tokens=4000, count_tokens=len)
        for turn in made.turns:
            texts += [" " + turn.user, turn.assistant]
        texts.append(" " + (made.system or ""))
    return texts


def train_tokenizer(num_conversations: int = 2500) -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template; single digits are tokens of their own."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus(num_conversations), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=TEMPLATE, model_max_length=WINDOW, clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    train_tokenizer().save_pretrained(args.out)
    print(f"tokenizer written to {args.out}")


if __name__ == "__main__":
    main()
