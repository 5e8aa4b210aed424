"""lm-eval's `local-completions` on text of this repository, item by item against transformers.

The same weights in float32 on both sides: what the harness makes of the server's numbers must be what
transformers computes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.compat.rooms import PythonRoom
from tests.helpers.reference import reference_model
from tests.helpers.stack import ROOT
from tests.helpers.text import BUNDLED, bundled_codec, bundled_source

ITEMS = 50
_CONTEXT_WORDS, _ITEM_WORDS, _NEW_TOKENS = 16, 6, 4
#: Sums of float32 logarithms, computed in batches of other sizes.
TOLERANCE = 2e-2
#: Of two candidates as close as this either may be chosen.
TIE = 1e-3
_TASKS = {
    "ms_likelihood": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{continuation}}",
        "metric_list": [{"metric": "acc"}],
    },
    "ms_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{continuation}}",
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": _NEW_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@dataclass(frozen=True, slots=True)
class Scores:
    """How far apart the two sides are."""

    items: int
    largest: float


def run(room: PythonRoom, url: str) -> Scores:
    """Both tasks, compared. Raises AssertionError where the sides differ."""
    items = _items()
    folder = room.folder / "task"
    folder.mkdir(exist_ok=True)
    _write(folder, items)
    results = room.folder / "results"
    arguments = (
        f"model={BUNDLED},base_url={url}/v1/completions,tokenizer_backend=huggingface,"
        f"tokenizer={folder},tokenized_requests=True,num_concurrent=4,max_retries=1,max_length=2048"
    )
    room.run(
        *(room.bin / "lm_eval", "--model", "local-completions", "--model_args", arguments),
        *("--tasks", ",".join(_TASKS), "--include_path", folder, "--output_path", results, "--log_samples"),
        env={"OPENAI_API_KEY": "none"},
    )
    print("lm-eval is done, now transformers", flush=True)
    torch.set_num_threads(1)  # several would wait for each other at every product, on a busy machine for long
    model = reference_model()
    likelihoods = {each["doc"]["context"]: each["resps"][0][0] for each in _samples(results, "ms_likelihood")}
    texts = {each["doc"]["context"]: each["resps"][0][0] for each in _samples(results, "ms_generate")}
    assert len(likelihoods) == len(texts) == len(items)
    largest = 0.0
    for done, (context, continuation) in enumerate(items):
        if done % 10 == 0:
            print(f"{done} of {len(items)} items compared", flush=True)
        said, greedy = likelihoods[context]
        expected, is_greedy, margin = _likelihood(model, context, continuation)
        largest = max(largest, abs(float(said) - expected))
        assert abs(float(said) - expected) < TOLERANCE, (context, said, expected)
        assert (str(greedy) == "True") == is_greedy or margin < TIE, (context, continuation)
        _compare_generated(model, context, texts[context])
    return Scores(2 * len(items), largest)


def _items() -> list[tuple[str, str]]:
    """Pieces of our own documents: a context, and how it goes on."""
    words = " ".join((ROOT / "docs" / "architecture.md").read_text().split()).split(" ")
    step = _CONTEXT_WORDS + _ITEM_WORDS
    pieces = [words[at : at + step] for at in range(0, ITEMS * step, step)]
    assert len(pieces[-1]) == step, "the document is too short"
    return [(" ".join(p[:_CONTEXT_WORDS]), " " + " ".join(p[_CONTEXT_WORDS:])) for p in pieces]


def _write(folder: Path, items: Sequence[tuple[str, str]]) -> None:
    """The items, the tasks, and a tokenizer that transformers can load."""
    lines = [json.dumps({"context": context, "continuation": goes_on}) for context, goes_on in items]
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n")
    for name, task in _TASKS.items():
        shared = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{context}}",
            "target_delimiter": "",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(shared | task))  # JSON is YAML
    bundled_source().tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _samples(results: Path, task: str) -> list[dict[str, Any]]:
    newest = max(results.rglob(f"samples_{task}_*.jsonl"), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for line in newest.read_text().splitlines()]


@torch.inference_mode()
def _likelihood(model: Any, context: str, continuation: str) -> tuple[float, bool, float]:
    """The sum over the continuation, whether it is what greedy decoding gives, and how clearly."""
    codec = bundled_codec()
    whole = codec.encode(context + continuation, add_special_tokens=False)
    start = len(codec.encode(context, add_special_tokens=False))
    scores = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)[start - 1 : -1]
    chosen = scores.gather(1, torch.tensor(whole[start:])[:, None])[:, 0]
    gaps = scores.max(-1).values - chosen
    return float(chosen.sum()), bool((gaps == 0).all()), float(gaps.max())


@torch.inference_mode()
def _compare_generated(model: Any, context: str, said: str) -> None:
    """Every token of ``said`` is transformers' own choice, or as good."""
    codec = bundled_codec()
    prompt = torch.tensor([codec.encode(context, add_special_tokens=False)])
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for logits in made.logits:
        best = logits[0].float().topk(2).values
        if float(best[0] - best[1]) < TIE:
            return  # either may follow, and what comes after depends on it
    expected = codec.decode(made.sequences[0, prompt.shape[1] :].tolist(), skip_special_tokens=True)
    assert said == expected, (context, said, expected)
