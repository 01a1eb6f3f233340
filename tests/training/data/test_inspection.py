"""`bestiary data inspect`: it says what is trained and names the traps; its page is seen in a real browser."""

import gzip
import json

import pytest
from huggingface_hub.utils import httpx

from bestiary.bridges.hub import PATIENCE_S
from bestiary.tools import cli
from bestiary.tools.data_page import data_page
from bestiary.training.data.config import load_data_config
from bestiary.training.data.errors import InvalidPlan, StateMismatch
from bestiary.training.data.inspection import histogram, inspect
from bestiary.training.data.plan import check_same
from tests.verify.browser import Browser, executable, picture

EVIL = "</div></mark><script data-evil>alert(1)</script>"
TALKS = [
    {"messages": [{"role": "user", "content": "Q <|im_end|>"}, {"role": "assistant", "content": EVIL}]},
    {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]},
    {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": ""}]},
    {"messages": [{"role": "user", "content": "long " * 80}, {"role": "assistant", "content": "Short."}]},
    {"messages": [{"role": "user", "content": "Nobody answers."}]},
]


@pytest.fixture(scope="module")
def run_file(tokenizer_folder, tmp_path_factory):
    """A run's file with two sources, one of them with everything that is worth a warning."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "talks.jsonl").write_text("\n".join(json.dumps(row) for row in TALKS))
    with gzip.open(folder / "texts.jsonl.gz", "wt") as texts:
        texts.write(json.dumps({"body": "Plain text."}))
    sources = [
        {"name": "talks", "files": "talks.jsonl", "kind": "chat", "weight": 3},
        {"name": "texts", "files": "texts.jsonl.gz", "kind": "text", "columns": {"text": "body"}},
    ]
    tokenizer = {"src": str(tokenizer_folder("smollm"))}
    config = {"recipe": "sft", "data": {"tokenizer": tokenizer, "pack_length": 64, "sources": sources}}
    (folder / "run.json").write_text(json.dumps(config))
    return folder / "run.json"


@pytest.fixture(scope="module")
def report(run_file):
    return inspect(load_data_config(run_file))


def test_samples_show_what_is_trained(report):
    talks, texts = report.sources
    assert [run.text for run in talks.samples[1].runs if run.trained] == ["Hello.<|im_end|>"]
    assert texts.loss_tokens == texts.tokens > 0
    assert talks.by_role["user"][1] == 0
    assert talks.by_role["assistant"][1] == talks.loss_tokens


def test_every_trap_is_named_with_its_count(report):
    talks = report.sources[0]
    said = " ".join(talks.warnings)
    for words in (
        "1 of 5 spell out control tokens in their texts, kept as text.",
        "1 of 5 are longer than a pack of 64 (overflow: error).",
        "1 of 5 are the same as one before.",
        "1 of 5 have an assistant's turn without a word.",
    ):
        assert words in said
    assert talks.refused == 1
    assert talks.refusals == ["talks.jsonl row 5: the whole row: messages holds no message of role 'assistant'."]
    assert "is a stop token" in report.warnings[0]


@pytest.mark.slow
def test_an_empty_block_of_reasoning_is_a_trap(tokenizer_folder, run_file, tmp_path):
    config = json.loads(run_file.read_text())["data"]
    config["sources"] = [{**config["sources"][0], "files": str(run_file.parent / "talks.jsonl")}]
    config["tokenizer"]["src"] = str(tokenizer_folder("qwen3"))
    told = {}
    for thinking in (True, False):
        config["tokenizer"]["arguments"] = {"enable_thinking": thinking}
        (tmp_path / "run.json").write_text(json.dumps({"data": config}))
        told[thinking] = inspect(load_data_config(tmp_path / "run.json"))
    assert "5 of 5 train an empty block of reasoning" in " ".join(told[True].sources[0].warnings)
    assert "reasoning" not in " ".join(told[False].sources[0].warnings)
    assert "otherwise than the whole conversation" in told[False].warnings[0]


def test_shares_follow_weights_and_lengths(report):
    (documents, tokens), (other_documents, other_tokens) = report.shares["talks"], report.shares["texts"]
    assert documents == pytest.approx(0.75)
    assert documents + other_documents == tokens + other_tokens == pytest.approx(1)
    assert tokens > documents


def test_packing_is_a_share_of_slots(report):
    assert report.packing["packs"] >= 2
    assert 0 < report.packing["padded"] <= 1
    assert 0 < report.packing["packed"] <= 1


def test_a_histogram_counts_every_length_once():
    found = histogram([0, 31, 32, 4096, 70000])
    assert sum(count for _, _, count in found) == 5
    assert found[0] == (0, 32, 2)
    assert found[-1] == (32768, None, 1)


def test_a_wrong_key_is_named_with_the_nearest(run_file, tmp_path):
    config = json.loads(run_file.read_text())
    config["data"]["pack_lenght"] = config["data"].pop("pack_length")
    (tmp_path / "run.json").write_text(json.dumps(config))
    with pytest.raises(InvalidPlan, match=r"data\.pack_lenght is no known key(.|\n)*did you mean pack_length\?"):
        load_data_config(tmp_path / "run.json")


def test_the_config_makes_a_plan_bound_to_the_tokenizer(run_file, tokenizer_of):
    plan = load_data_config(run_file).plan(tokenizer_of("smollm"))
    assert plan.pad_id == tokenizer_of("smollm").pad_id
    assert [source.name for source in plan.sources] == ["talks", "texts"]
    assert json.loads(plan.tokenizer)["tokenizer"] == tokenizer_of("smollm").fingerprint.tokenizer


def test_a_plan_changes_with_what_is_trained(run_file, tokenizer_of, tmp_path):
    """Labels depend on more than the tokenizer: a resume under another choice of turns must be noticed."""
    config = json.loads(run_file.read_text())
    config["data"]["sources"][0]["train_on"] = {"turns": "last"}
    for source in config["data"]["sources"]:
        source["files"] = str(run_file.parent / source["files"])
    (tmp_path / "run.json").write_text(json.dumps(config))
    configs = (load_data_config(file) for file in (run_file, tmp_path / "run.json"))
    before, after = (config.plan(tokenizer_of("smollm")).listed().describe() for config in configs)
    with pytest.raises(StateMismatch, match=r"source 'talks': encode was .*all.* and is .*last"):
        check_same(after, before, added=(), removed=(), reweighted=False)


def test_the_command_writes_json_and_page_and_colours_the_terminal(run_file, tmp_path, capsys, monkeypatch):
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "200"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    files = ["--json", str(tmp_path / "data.json"), "--html", str(tmp_path / "data.html")]
    assert cli.main(["data", "inspect", str(run_file), *files]) == 1  # a row was refused
    shown = capsys.readouterr().out
    assert "\x1b[1;32mHello.<|im_end|>\x1b[0m" in shown
    told = json.loads((tmp_path / "data.json").read_text())
    assert told["schema"] == "bestiary.data_inspect/1"
    assert told["sources"][0]["refused"] == 1
    assert (tmp_path / "data.html").read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["data", "inspect", str(tmp_path / "absent.yaml")]) == 7


def test_what_no_encoding_has_is_a_refused_row_and_names_are_no_markup(run_file, tmp_path, capsys):
    """Half of a surrogate pair, which JSON can spell; and a source's name, in brackets."""
    asked = [{"role": "user", "content": text} for text in ("Hi.", "so \ud83d far")]
    good, bad = (json.dumps({"messages": [one, {"role": "assistant", "content": "Hello."}]}) for one in asked)
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{bad}\n")
    config = json.loads(run_file.read_text())
    config["data"]["sources"] = [{"name": f"sums [{end}b]", "files": "rows.jsonl", "kind": "chat"} for end in ("", "/")]
    (tmp_path / "run.json").write_text(json.dumps(config))
    assert cli.main(["data", "inspect", str(tmp_path / "run.json"), "--html", str(tmp_path / "data.html")]) == 1
    shown = capsys.readouterr().out
    assert "half of a surrogate pair, U+D83D, stands in the text near" in " ".join(shown.split())
    assert {"sums [b]   chat", "sums [/b]  chat"} <= {line[:15] for line in shown.splitlines()}


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["data", "inspect", "--help"])
    assert "bestiary data inspect run.yaml --html" in capsys.readouterr().out


@pytest.fixture(scope="module")
def browser():
    one = Browser(executable())
    yield one
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desk"])
def test_a_browser_shows_the_page(browser, report, tmp_path, width, dark):
    """No complaint, no request, no script, no wider than the screen; trained text is in the colour of what is good."""
    (tmp_path / "data.html").write_text(data_page(report, "run.json"), encoding="utf-8")
    browser.complaints.clear()
    browser.open(tmp_path / "data.html", width=width, height=900, dark=dark)
    assert browser.ask("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    assert browser.ask("document.scripts.length + document.querySelectorAll('[data-evil]').length") == 0
    assert EVIL in browser.ask("document.querySelector('mark').textContent")
    colour = "getComputedStyle(document.querySelector('mark')).backgroundColor"
    assert browser.ask(f"{colour} != getComputedStyle(document.querySelector('.sample')).backgroundColor")
    assert browser.ask("Math.max(...[...document.querySelectorAll('.bars i')].map(one => one.offsetWidth))") > 30
    browser.ask("document.querySelector('mark').scrollIntoView({block: 'center'})")
    shot = picture(browser.screenshot(scale=0.5))
    marked = tuple(int(part) for part in browser.ask(colour)[4:-1].split(","))
    assert shot.colours()[marked] > 50
    assert browser.complaints == []


def test_a_tokenizer_that_no_hub_is_there_for_is_named_at_once(run_file, tmp_path, monkeypatch, capsys):
    asked = []

    def nobody(self, repo, *, revision, timeout):
        asked.append((repo, timeout))
        raise httpx.ConnectTimeout("no route")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", nobody)
    content = json.loads(run_file.read_text())
    content["data"]["tokenizer"] = {"src": "tokenzer"}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert cli.main(["data", "inspect", str(tmp_path / "run.json")]) == 7
    assert asked == [("tokenzer", PATIENCE_S)]
    said = " ".join(capsys.readouterr().err.split())
    assert "tokenzer is no folder here" in said
    assert "HF_HUB_OFFLINE=1 asks no hub" in said
