"""The recipe's model: a small seeded Qwen3 and a tokenizer whose vocabulary is exactly the model's.

verl masks token ids beyond the tokenizer's length in the engine, and vLLM pads a vocabulary to a multiple of 64;
with 64 real tokens neither adds a logit on one side only.
"""

import json
import pathlib
import string

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_ROLES = ["system", "user", "assistant"]
VOCABULARY = [_PAD, _START, _END, "\n", " ", *_ROLES, *string.digits, *string.ascii_lowercase, *"+-*/=#?.,:;()[]<>|_!"]

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer(size: int = len(VOCABULARY)) -> PreTrainedTokenizerFast:
    """One token a role name and one a character; every text over the vocabulary round-trips.

    Tokens beyond those, up to ``size``, stand for no text: a vocabulary as wide as a real model's.
    """
    words = [*VOCABULARY, *(f"<|{i}|>" for i in range(len(VOCABULARY), size))]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*_ROLES, r"[\s\S]"])), behavior="isolated")
    core.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=_END, pad_token=_PAD, additional_special_tokens=[_START]
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def config(layers: int, hidden: int, head: int = 64, ffn: int = 0, vocabulary: int = len(VOCABULARY)) -> Qwen3Config:
    """A Qwen3 with heads of `head` values, two query heads a key/value head, and an untied output.

    ffn: the width of its MLP; 0 for twice the hidden size.
    """
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn or 2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // (2 * head),
        head_dim=head,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(_END),
        pad_token_id=VOCABULARY.index(_PAD),
        dtype="bfloat16",
    )


def write_model(folder: pathlib.Path, seed: int, settings: Qwen3Config) -> None:
    """Writes config, tokenizer and bf16 weights drawn from ``seed`` as a Hugging Face checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(settings).to(torch.bfloat16)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings.architectures = ["Qwen3ForCausalLM"]
    settings.save_pretrained(folder)
    tokenizer(settings.vocab_size).save_pretrained(folder)
    generation = {"eos_token_id": settings.eos_token_id, "pad_token_id": settings.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
