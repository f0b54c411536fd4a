"""Published files, in small, are read to the same shapes as what stands in for them."""

from __future__ import annotations

import json
from pathlib import Path

from bench import texts
from bench.texts import Meeting, Passage, Question, Search, Task


def write(folder: Path, name: str, content: object, *, lines: bool = False) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    records = content if lines else [content]
    assert isinstance(records, list)
    path.write_text("\n".join(json.dumps(each, ensure_ascii=False) for each in records), encoding="utf-8")


def test_passages(tmp_path: Path) -> None:
    asked = {"question": "Who?", "answers": [{"text": "She", "answer_start": 0}]}
    write(
        tmp_path, "xquad/xquad.en.json", {"data": [{"paragraphs": [{"context": "She did.", "qas": [asked]}]}]}
    )
    write(tmp_path, "2wiki/2wikimultihopqa_corpus.json", [{"title": "It", "text": "was."}])
    assert texts.passages(tmp_path) == ([Passage("She did.", (Question("Who?", ("She",)),))], ["It\nwas."])


def test_searches_cut_passages_to_chunks(tmp_path: Path) -> None:
    record = {"question": "Who?", "answers": ["a", "b"], "ctxs": [{"title": "", "text": "word " * 150}]}
    write(tmp_path, "musique/musique_s.json", [record])
    chunks = (" ".join(["word"] * 110), " ".join(["word"] * 40))
    assert texts.searches(tmp_path) == [Search(Question("Who?", ("a", "b")), chunks)]


def test_tasks_name_functions_that_are_described(tmp_path: Path) -> None:
    for document in ("gorilla_file_system", "math_api", "message_api", "ticket_api", "trading_bot"):
        write(
            tmp_path,
            f"bfcl/multi_turn_func_doc/{document}.json",
            [{"name": "cp"}, {"name": "mv"}],
            lines=True,
        )
    for document in ("travel_booking", "posting_api", "vehicle_control"):
        write(tmp_path, f"bfcl/multi_turn_func_doc/{document}.json", [], lines=True)
    record = {
        "question": [[{"role": "user", "content": "Move it."}], []],
        "path": ["MathAPI.mv", "MathAPI.mv", "Other.fly"],
        "involved_classes": ["MathAPI", "Other"],
    }
    write(tmp_path, "bfcl/BFCL_v4_multi_turn_base.json", [record], lines=True)
    assert texts.tasks(tmp_path) == [Task("Move it.", ("MathAPI.mv",), ("MathAPI.cp", "MathAPI.mv"))]
    assert texts.functions(tmp_path)["TicketAPI.cp"] == '{"name": "cp"}'


def test_meetings_with_line_separators_inside(tmp_path: Path) -> None:
    """U+2028 ends a line for str.splitlines, not for JSON lines."""
    turns = [{"speaker": name, "content": f"said\u2028{name}"} for name in "ABC"]
    query = {"query": "What?", "answer": "That.", "relevant_text_span": [["1", "2"], ["0", "1"], ["2", "9"]]}
    for part in ("test", "val"):
        write(
            tmp_path,
            f"qmsum/qmsum_{part}.jsonl",
            [{"meeting_transcripts": turns, "specific_query_list": [query]}],
            lines=True,
        )
    meeting = Meeting(tuple(f"{name}: said\u2028{name}" for name in "ABC"), (("What?", (0, 1, 2)),))
    assert texts.meetings(tmp_path) == [meeting, meeting]
