from pathlib import Path

from train.provenance import base_model, trained_on

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_of_the_hubs_cache_tells_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--codellama--CodeLlama-7b-hf" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nlicense: llama2\nlicense_link: LICENSE\ntags: [code]\n---\n# Model\n"
    )
    assert base_model(str(folder)) == {
        "name": "CodeLlama-7b-hf",
        "hub": "codellama/CodeLlama-7b-hf",
        "commit": COMMIT,
        "license": "llama2",
        "license_link": "LICENSE",
    }


def test_another_folder_tells_what_its_card_says(tmp_path: Path) -> None:
    """The _name_or_path of a fine-tuned model's config.json is that of its base, and may be a path.

    The folder's own name was taken, and the demo's card had the title "model_directory with adaptive tokens".
    """
    folder = tmp_path / "7b"
    folder.mkdir()
    (folder / "config.json").write_text('{"_name_or_path": "someone/else"}')
    assert base_model(f"{folder}/") == base_model(None) == {}
    for broken in ("---\nlicense: [\n---\n", "---\n- a\n---\n", "---\nlicense: [a]\n---\n", "# Model\n"):
        (folder / "README.md").write_text(broken)
        assert base_model(str(folder)) == {}
    (folder / "README.md").write_bytes(b"\xff\xfe")
    assert base_model(str(folder)) == {}
    (folder / "README.md").write_text("---\nmodel_name: Some-7B\nlicense: mit\n---\n# Model\n")
    assert base_model(str(folder)) == {"name": "Some-7B", "license": "mit"}


def test_languages_come_by_their_tokens() -> None:
    languages = {"c": {"tokens": 5}, "go": {"tokens": 7}}
    train = {"documents": 2, "tokens": 12, "modes": {"PLAIN": 2}, "languages": languages, "sequences": 1}
    assert trained_on({"train": train}) == {
        "documents": 2,
        "tokens": 12,
        "modes": {"PLAIN": 2},
        "languages": ["go", "c"],
        "decontaminated": None,
    }
    assert trained_on({"train": train, "decontaminated": ["mbpp"]})["decontaminated"] == ["mbpp"]
