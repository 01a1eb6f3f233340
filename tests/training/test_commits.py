"""A run from the hub is a run from commits: its branches move while it is stopped, and it does not."""

import json
import shutil

import pytest
import torch
import yaml

from bestiary.bridges.errors import OfflineError
from bestiary.bridges.hub import split_revision
from bestiary.models import AutoDecoder
from bestiary.training.commits import commits_in, pinned, pinned_name
from bestiary.training.config import load_run_config
from bestiary.training.errors import CheckpointRefused
from bestiary.training.export import load_resume_point
from bestiary.training.processes import processes
from bestiary.training.rl.config import GrpoConfig
from bestiary.training.run import load_other, mesh_of, run

from ..docs.workplace import lay_out

NAME, THEN, NOW = "somebody/model", "a" * 40, "b" * 40
BEGUN, OTHER = f"{NAME}@{THEN}", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A hub's cache with two commits of a model that differ in one weight, and the file of a run on it."""
    place = tmp_path_factory.mktemp("commits")
    lay_out(place)
    snapshots = place / "hub" / "models--somebody--model" / "snapshots"
    shutil.copytree(place / "base", snapshots / THEN)
    model = AutoDecoder.from_pretrained(place / "base")
    with torch.no_grad():
        model.get_parameter(OTHER).add_(1)
    shutil.copytree(place / "base", snapshots / NOW)
    model.save_pretrained(snapshots / NOW, overwrite=True)
    for file in (place / "base").iterdir():  # overwrite replaces the folder, tokenizer and all
        if not (snapshots / NOW / file.name).exists():
            shutil.copy(file, snapshots / NOW)
    content = yaml.safe_load((place / "run.yaml").read_text())
    content["model"] = content["data"]["tokenizer"] = {"src": NAME}
    content["lora"] = {"r": 2}
    (place / "run.yaml").write_text(yaml.safe_dump(content))
    return place


@pytest.fixture(autouse=True)
def hub(place, monkeypatch):
    """Says which commit the branch is at; it begins at the first."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))

    def points(commit):
        ref = place / "hub" / "models--somebody--model" / "refs" / "main"
        ref.parent.mkdir(exist_ok=True)
        ref.write_text(commit)

    points(THEN)
    return points


def config(place, out, *changes, recipe="sft", file="run.yaml"):
    return load_run_config(place / file, [f"out={out}", *changes], recipe=recipe)


@pytest.mark.slow
def test_a_run_keeps_the_commit_that_it_began_with(place, tmp_path, hub):
    out = tmp_path / "run"
    asked = config(place, out)
    assert run(asked).step == 2
    written = load_run_config(out / "config.yaml")
    assert (written.model.revision, written.data.tokenizer.revision) == (THEN, THEN)
    state = json.loads((out / "checkpoints" / "step-00000001" / "state.json").read_text())
    assert state["commits"] == {"model": BEGUN, "data.tokenizer": BEGUN, "base": BEGUN}
    adapter = json.loads((out / "export" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, THEN)

    hub(NOW)
    before = (out / "export" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(out / "checkpoints" / "step-00000002")
    assert run(asked).resumed == 1
    assert (out / "export" / "adapter_model.safetensors").read_bytes() == before
    assert load_run_config(out / "config.yaml") == written
    kept, _ = load_resume_point(out / "checkpoints" / "step-00000001")
    for model in (kept, AutoDecoder.from_pretrained(out / "export")):  # the base that the adapter names
        assert model.revision == THEN
        assert torch.equal(model.get_parameter(OTHER), AutoDecoder.from_pretrained(place / "base").get_parameter(OTHER))

    with pytest.raises(CheckpointRefused, match=rf"model: {NAME}@main is commit {NOW}, and the run began with {THEN}"):
        run(config(place, out, "model.revision=main"))
    (out / "config.yaml").unlink()  # then the resume points still know
    with pytest.raises(CheckpointRefused, match=rf"was .*{THEN}.* and is .*{NOW}"):
        run(asked)


def test_every_model_that_a_run_names_gets_its_commit(place, tmp_path, hub):
    distilled = pinned(config(place, tmp_path, f"loss.teacher={NAME}", recipe="distill"))
    assert distilled.loss.teacher == BEGUN
    file = {"model": {"src": NAME}, "data": json.loads(config(place, tmp_path).data.model_dump_json()), "out": tmp_path}
    file["data"]["sources"][0]["kind"] = "prompt"
    file |= {"rollouts": {"max_tokens": 4}, "loop": {"steps": 1}}
    file["algorithm"] = {"options": {"kl_coef": 0.1}}
    file["rewards"] = {"functions": [{"name": "judge", "model": f"{NAME}@main"}, {"name": "own", "function": "a:b"}]}
    policy = pinned(GrpoConfig.model_validate(file))
    assert policy.beside == (BEGUN, BEGUN)  # the policy before training, and the judge
    assert commits_in(policy) == dict.fromkeys(("model", "data.tokenizer", "rewards.judge.model"), BEGUN)
    hub(NOW)
    assert split_revision(pinned_name(NAME)) == (NAME, NOW)


@pytest.mark.slow
def test_the_reference_is_of_the_commit_that_trains(place, tmp_path, hub):
    """And not of what the branch has become."""
    asked = config(place, tmp_path, "lora=null", f"model.revision={THEN}", recipe="dpo", file="run.yaml")
    hub(NOW)
    with processes(60) as here:
        reference = load_other(asked, asked.reference, here, mesh_of(asked.parallel, here))
    assert reference.revision == THEN


def test_a_tokenizer_of_one_word_gets_its_commit(place, tmp_path, hub):
    cached = place / "hub" / "models--word"
    if not cached.exists():
        shutil.copytree(place / "hub" / "models--somebody--model", cached, symlinks=True)
    (cached / "refs" / "main").write_text(THEN)
    asked = config(place, tmp_path, "data.tokenizer.src=word")
    begun = pinned(asked)
    assert begun.data.tokenizer.revision == THEN
    assert commits_in(begun)["data.tokenizer"] == f"word@{THEN}"
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(begun.yaml())
    (cached / "refs" / "main").write_text(NOW)
    assert pinned(asked) == begun
    with pytest.raises(CheckpointRefused, match=rf"data\.tokenizer: .* is commit {NOW}, and the run began with {THEN}"):
        pinned(config(place, tmp_path, "data.tokenizer.src=word", "data.tokenizer.revision=main"))


def test_one_word_that_is_no_folder_and_no_tokenizer_of_the_cache_is_named(place, tmp_path):
    with pytest.raises(OfflineError, match=r"tokenzer is no folder here"):
        pinned(config(place, tmp_path, "data.tokenizer.src=tokenzer"))


def test_folders_and_files_have_no_commit(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    local = config(place, tmp_path, "model.src=base", "data.tokenizer.src=base", "loss.reference=runs/sums.npz")
    assert pinned(local) == local
    assert commits_in(local) == {}
