"""The table of messages: what stands in the source is found, with its gaps and its remedy."""

from pathlib import Path

from bestiary.tools.error_messages import GAP, messages, table

ROOT = Path(__file__).resolve().parents[2]
FOUND = messages(ROOT)


def test_a_message_is_found_by_its_words_and_has_its_remedy() -> None:
    (one,) = [one for one in FOUND if one.error == "OfflineError"]
    assert one.what.startswith(f"{GAP} is not in the local cache and the hub cannot be reached")
    assert "HF_HUB_OFFLINE" in one.remedy
    assert one.file == "bridges/hub.py"


def test_most_messages_have_a_remedy_of_their_own() -> None:
    assert sum(bool(one.remedy) for one in FOUND) > 0.8 * len(FOUND) > 400


def test_what_would_be_markup_is_shown_as_it_stands() -> None:
    shown = table(FOUND)
    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows)
    assert "\\[" in shown
    headings = [line for line in shown.splitlines() if line.startswith("### ")]
    assert len(headings) == len(set(headings)) > 60
