"""Suggestions for misspelt names: one wording, made in one place."""

from pathlib import Path

from allranks.utils.text import did_you_mean, nearest_file_hint, nearest_name, suggest


def test_only_a_similar_name_is_suggested() -> None:
    assert did_you_mean("pytorch_dpd", ["zero1", "pytorch_ddp"]) == "; did you mean 'pytorch_ddp'?"
    assert did_you_mean("lama", ["llama", "gpt2"], form="tiny:{}") == "; did you mean tiny:llama?"
    assert did_you_mean("whatever", ["zero1", "pytorch_ddp"]) == ""
    assert (nearest_name("lama", ["llama"], 0.95), nearest_name("lama", ["llama"], 0.8)) == (None, "llama")
    assert suggest() == "" and suggest("a", "b") == "; did you mean a or b?"


def test_a_file_is_suggested_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "job.sh").touch()
    assert nearest_file_hint(tmp_path / "jobs.sh") == f"; did you mean {tmp_path}/job.sh?"
    assert nearest_file_hint(tmp_path / "missing" / "job.sh") == ""
