"""Where sampling defaults come from: `--generation-config` and `--override-generation-config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.checkpoint import CheckpointError
from workers.checkpoint.sampling_defaults import choose

OWN = {"temperature": 0.6, "top_p": 0.9}


def test_generation_config_auto_is_the_models() -> None:
    assert choose(OWN, "auto", "{}") == OWN


def test_generation_config_vllm_is_none() -> None:
    assert choose(OWN, "vllm", "{}") == {}


def test_generation_config_from_a_file_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_k": 20, "max_new_tokens": 99, "eos_token_id": 2, "do_sample": True}))
    expected = {"top_k": 20.0, "max_new_tokens": 99.0}
    assert choose(OWN, str(tmp_path), "{}") == choose(OWN, str(file), "{}") == expected


def test_override_generation_config_wins() -> None:
    assert choose(OWN, "auto", '{"temperature": 0, "min_p": 0.1}') == {
        "temperature": 0.0, "top_p": 0.9, "min_p": 0.1,
    }  # fmt: skip
    assert choose(OWN, "vllm", '{"top_k": -1}') == {"top_k": -1.0}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('{"temperature": 3}', "temperature is 3, and must be from 0 to 2"),
        ('{"top_k": "many"}', "not a number"),
        ('{"max_new_tokens": 0}', "must be from 1"),
        ('{"beams": 1, "a": 2}', "has a, beams; it may have temperature, "),
    ],
)
def test_a_bad_override_is_refused_with_a_reason(override: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        choose(OWN, "auto", override)


def test_a_bad_file_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        choose(OWN, str(tmp_path), "{}")
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(CheckpointError, match="top_p is 7"):
        choose(OWN, str(tmp_path), "{}")
