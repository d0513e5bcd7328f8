"""`fewbits report` without a browser: what the page says, that text stays text, and that damaged results are refused."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made_results
import pytest

import fewbits
from fewbits.errors import InputError
from fewbits.planning.accuracy import Thresholds
from fewbits.reporting.page import checked_json, markup, model_map
from fewbits.reporting.schema import Gathered

HOSTILE = '</script><img src=x onerror="document.hacked=1">\'`&\u2028<!--'


class Seen(HTMLParser):
    """Elements, attributes and text, as a browser without scripts would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._shown: list[str] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "input"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "elements are closed in order"

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        self.texts.setdefault(inside, []).append(data)
        self._shown += [] if inside in {"script", "style"} else [data]

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def data(self) -> Any:
        """The figures that the scripts draw."""
        return json.loads(next(text for text in self.texts["script"] if text.startswith("{")))

    @property
    def words(self) -> str:
        return " ".join("".join(self._shown).split())


def page_of(results: Any, folder: Path, **options: Any) -> Seen:
    (folder / "results.json").write_text(json.dumps(results))
    page = fewbits.report(folder, folder / "report.html", **options)
    return Seen(page.read_text(encoding="utf-8"))


def test_the_verdict_is_in_words_at_the_top(tmp_path: Path) -> None:
    results = made_results.results(Thresholds(max_kl=0.5))
    seen, verdict = page_of(results, tmp_path), results["verdict"]
    said = seen.words
    assert said.index("Passed") < said.index("What each size buys")
    for part in ("tiny.gguf", "tiny-llama", "llama.cpp", "KL divergence at most 0.5", f"{verdict['tokens']:,} tokens", "fp16"):
        assert part in said
    assert f"{100 * verdict['top1_agreement']:.1f} of 100 cases" in said
    assert f"{verdict['bytes'] / 1e6:.2f} MB" in said


@pytest.mark.parametrize(
    ("limits", "words"), [(Thresholds(max_kl=1e-9), ["Failed"]), (Thresholds(), []), (Thresholds(min_agreement=0.5), ["Passed"])]
)
def test_each_outcome_has_its_word(limits: Thresholds, words: list[str], tmp_path: Path) -> None:
    results = made_results.results(limits)
    seen = page_of(results, tmp_path)
    assert seen.texts["strong"][:-1] == words and seen.texts["strong"][-1] in ("Close", "Near", "Far", "Damaged")
    assert all(failure in seen.words for failure in results["verdict"]["failures"])


def test_a_mixture_of_tens_of_thousands_of_weights_has_a_page(tmp_path: Path) -> None:
    assert page_of(made_results.results() | {"more": [0] * 3_500_000}, tmp_path).words


def test_a_file_that_was_not_run_says_so(tmp_path: Path) -> None:
    results = made_results.results() | {"verdict": None, "accumulation": None, "left_out": {"accumulation": "nothing was run"}}
    seen = page_of(results, tmp_path)
    assert seen.texts["strong"] == ["Not verified"]
    assert "nothing was run" in seen.words


def test_every_picture_has_a_label_and_a_table(tmp_path: Path) -> None:
    results = made_results.results()
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(made_results.kernel_bench()))
    seen = page_of(results, tmp_path, bench=bench)
    pictures = [attributes for _, attributes in seen.elements if "data-chart" in attributes]
    names = {attributes["data-chart"] for attributes in pictures}
    assert names == {"frontier", "bits", "map", "growth", "costly", "weights", "inputs", "sources", "memory", "reached", "domains"}
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    captions = seen.texts["caption"]
    assert len(captions) == len(seen.named("table")) >= 9
    for name in results["plan"]["weights"]:
        assert seen.texts["th"].count(name) >= 2  # among all weights, and among ranges


def test_the_worst_kind_of_text_is_named(tmp_path: Path) -> None:
    results = made_results.results()
    kinds = sorted(results["verdict"]["domains"], key=lambda each: -each["kl_mean"])
    seen = page_of(results, tmp_path)
    assert [row["name"] for row in seen.data["domains"]] == [each["name"] for each in kinds]
    assert all(row["low"] <= row["kl"] <= row["high"] for row in seen.data["domains"])
    assert f"furthest from its source on {results['verdict']['worst_domain']} (KL" in seen.words and kinds[0]["name"] in seen.texts["th"]
    results["verdict"] |= {"domains": [], "worst_domain": None}
    assert "domains" not in page_of(results, tmp_path).data


def test_the_map_has_every_plan_of_the_frontier(tmp_path: Path) -> None:
    results = made_results.results()
    drawn = page_of(results, tmp_path).data["map"]
    names, plans = results["frontier_plans"]["weights"], results["frontier_plans"]
    by_size = {stop["bytes"]: stop for stop in drawn["stops"]}
    assert [stop["bytes"] for stop in drawn["stops"]] == sorted(by_size)
    assert [stop["mine"] for stop in drawn["stops"]].count(True) == 1
    place = {cell["name"]: index for index, cell in enumerate(drawn["cells"])}
    checked = 0
    for point in plans["points"]:
        if point["bytes"] not in by_size:
            continue  # the plan of the file itself
        for index, name in enumerate(names):
            option = plans["options"][index][point["choice"][index]]
            fmt, nbytes, kl = by_size[point["bytes"]]["cells"][place[name]]
            assert (drawn["formats"][fmt], nbytes, kl) == (option["format"], option["bytes"], option["kl"])
            assert drawn["cells"][place[name]]["elements"] == math.prod(results["plan"]["weights"][name]["shape"])
        checked += 1
    assert checked >= len(plans["points"]) - 1


def test_experts_share_a_cell(tmp_path: Path) -> None:
    results = made_results.results()
    row = next(iter(results["plan"]["weights"].values()))
    experts = {f"model.layers.0.mlp.experts.down_proj.{i}": row | {"format": ("q4_k", "q8_0")[i % 2], "bytes": 10 + i} for i in range(4)}
    results["plan"]["weights"] |= experts
    cells = page_of(results | {"frontier_plans": None, "decision": None, "distributions": []}, tmp_path).data["map"]
    (index,) = (i for i, cell in enumerate(cells["cells"]) if "experts" in cell["name"])
    elements = 4 * row["shape"][0] * row["shape"][1]
    assert cells["cells"][index]["name"].endswith("(4 weights)")
    assert cells["cells"][index]["elements"] == elements
    fmt, nbytes, _ = cells["stops"][0]["cells"][index]
    assert (cells["formats"][fmt], nbytes) == ("q4_k/q8_0", 10 + 11 + 12 + 13)


def test_roles_that_end_alike_are_told_apart() -> None:
    places = [
        model_map.place(name) for name in ("a.layers.0.mlp.gate_proj", "a.layers.0.moe.gate_proj", "a.layers.11.mlp.up_proj", "a.norm")
    ]
    assert [(where.part, where.layer, where.role) for where in places[2:]] == [("a.layers", 11, "mlp.up_proj"), ("", None, "a.norm")]
    assert model_map._labels(places[:3]) == {"mlp.gate_proj": "mlp.gate_proj", "moe.gate_proj": "moe.gate_proj", "mlp.up_proj": "up"}


def hostile(value: Any) -> Any:
    """Every text and every name in it followed by what would break out of a page that does not escape."""
    keep = {"thresholds", "frontier_plans"}
    if isinstance(value, dict):
        named = value.keys() >= {"model.embed_tokens"}
        return {(key + HOSTILE if named else key): (entry if key in keep else hostile(entry)) for key, entry in value.items()}
    return [hostile(entry) for entry in value] if isinstance(value, list) else value + HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("made", [made_results.results, made_results.demonstration])
def test_text_stays_text(made: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    plain = page_of(made(), tmp_path)
    results = hostile(made())
    (results.get("detail") or results)["frontier_plans"] = None
    seen = page_of(results, tmp_path)
    assert not seen.named("img") and len(seen.named("script")) == len(plain.named("script")) == 5
    assert {tag for tag, _ in seen.elements} <= {tag for tag, _ in plain.elements} | {"code"}
    assert not any(name.startswith("on") for _, attributes in seen.elements for name in attributes)
    names = [cell["name"] for cell in seen.data["map"]["cells"]]
    assert names and all(name.endswith(HOSTILE) for name in names)
    assert HOSTILE.replace("`", "") in "".join(text.replace("`", "") for text in seen.texts["th"])


def test_scripts_run_by_their_hash_alone(tmp_path: Path) -> None:
    """The policy forbids whatever else: a network, a frame, an attribute with code in it."""
    seen = page_of(made_results.results(), tmp_path)
    (policy,) = (meta["content"] or "" for meta in seen.named("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert all(word.startswith("'sha256-") for word in rules["script-src"].split())
    assert not [a for _, a in seen.elements if any(key in a for key in ("src", "srcset", "action")) or str(a.get("href", "#"))[0] != "#"]


def test_markup_escapes_what_is_not_markup() -> None:
    inner = markup.tag("b", "<i>", title='"')
    assert markup.tag("p", inner, "a & b") == '<p><b title="&quot;">&lt;i&gt;</b>a &amp; b</p>'
    assert markup.tag("p", f"{inner}") == markup.tag("p", str(inner)[:])  # an f-string of it is text again
    assert "<b" not in markup.tag("p", f"{inner}")
    assert markup.prose("a `b` `") == "a `b` `" and markup.prose("a `<b>`") == "a <code>&lt;b&gt;</code>"


def test_the_page_is_light(tmp_path: Path) -> None:
    page_of(made_results.results(), tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 1_500_000


def test_results_without_the_extras_still_make_a_page(tmp_path: Path) -> None:
    """Those of a plain run of an older version: a plan, a verdict, the points of the frontier."""
    extras = ("source", "reproduction", "frontier_plans", "accumulation", "distributions", "memory", "kernels", "left_out")
    results = {key: value for key, value in made_results.results().items() if key not in extras}
    seen = page_of(results, tmp_path)
    assert len(seen.data["frontier"]["points"]) == len(results["decision"]["frontier"])
    assert len(seen.data["map"]["stops"]) == 1


def test_one_format_for_all_has_a_map_and_no_slider(tmp_path: Path) -> None:
    seen = page_of(made_results.results() | {"decision": None, "frontier_plans": None}, tmp_path)
    assert not seen.named("input") and len(seen.data["map"]["stops"]) == 1


def test_a_demonstration_shows_its_files(tmp_path: Path) -> None:
    results = made_results.demonstration()
    seen = page_of(results, tmp_path)
    assert [row["name"] for row in seen.data["files"]] == ["q8_0", "q4_k", "4.5bpw", "3bpw"]
    assert "4 files of the embedded model" in seen.words
    results["rows"][1]["crosscheck"]["agrees"] = False
    failed = page_of(results | {"detail": None}, tmp_path)
    assert failed.texts["strong"] == ["Failed"] and "q4_k.gguf did not pass" in failed.words


def test_peers_are_marks_of_the_frontier(tmp_path: Path) -> None:
    rows = [{"mix": "q4_k_m", "maker": "ggml", "bytes": 9, "bits_per_weight": 4.8, "predicted": None, "found": {"kl": 0.01}}]
    bench = tmp_path / "plans.json"
    bench.write_text(json.dumps({"model": "m", "texts": [{"text": "t", "rows": rows}]}))
    marks = page_of(made_results.results(), tmp_path, bench=[bench]).data["frontier"]["marks"]
    assert [(m["name"], m["bits"], m["kl"]) for m in marks if m["kind"] == "peer"] == [("q4_k_m by ggml", 4.8, 0.01)]


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no plan": lambda r: r.pop("plan"),
    "a list": lambda r: r.update(plan=[1]),
    "a number as text": lambda r: r["verdict"].update(kl_mean="0.1"),
    "a text as number": lambda r: r["verdict"].update(runtime=7),
    "a huge number": lambda r: r["verdict"].update(bytes=10**400),
    "a choice that is not there": lambda r: r["frontier_plans"]["points"][0]["choice"].__setitem__(0, 99),
    "another model's frontier": lambda r: r["frontier_plans"]["weights"].__setitem__(0, "other"),
    "coverage of another shape": lambda r: r["coverage"].pop("lengths"),
    "a shape of no elements": lambda r: next(iter(r["plan"]["weights"].values())).update(shape=[0, 0]),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_results_are_refused_with_a_hint(what: str, tmp_path: Path) -> None:
    results = copy.deepcopy(made_results.results())
    DAMAGE[what](results)
    with pytest.raises(InputError) as refused:
        page_of(results, tmp_path)
    assert refused.value.hint
    assert not (tmp_path / "report.html").exists()


def test_figures_that_are_not_finite_are_said_so(tmp_path: Path) -> None:
    """A model that overflowed: results.json says null."""
    results = made_results.results()
    results["verdict"] |= dict.fromkeys(("kl_mean", "kl_max", "ppl", "ppl_ratio", "max_logit_diff"), None)
    results["verdict"] |= {"kl_ci95": [None, None], "failures": ["the logits are not all finite"], "passed": False}
    seen = page_of(results, tmp_path)
    assert "not finite" in seen.words and seen.texts["strong"] == ["Failed"]


def test_the_command_line(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    work, out = tmp_path / "a.gguf.work", tmp_path / "page.html"
    work.mkdir()
    (work / "results.json").write_text(json.dumps(made_results.results()))
    for given in (work, work / "results.json", tmp_path / "a.gguf"):
        code, said, _ = run("report", given, "-o", out, "--json")
        assert code == 0 and json.loads(said) == {"page": str(out), "bytes": out.stat().st_size}
        out.unlink()
    code, _, told = run("report", tmp_path)
    assert code == 2 and "hint:" in told


def test_a_page_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(made_results.demonstration()))
    script = "import sys, fewbits; fewbits.report(sys.argv[1], sys.argv[2]); print('torch' in sys.modules)"
    words = [sys.executable, "-c", script, str(tmp_path), str(tmp_path / "report.html")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_numbers_are_numbers() -> None:
    for wrong in (True, "1", [1]):
        with pytest.raises(TypeError):
            checked_json.number(wrong)
        with pytest.raises(TypeError):
            checked_json.whole(wrong)


def test_what_is_gathered_is_read_back_whole() -> None:
    written = made_results.results()
    gathered = json.loads(json.dumps(asdict(checked_json.read(Gathered, written))))
    assert gathered == {each.name: written[each.name] for each in fields(Gathered)}


def test_a_list_is_not_taken_for_text_nor_a_text_for_a_list() -> None:
    written = made_results.results()
    for damage in ({"reproduction": {"commands": "fewbits"}}, {"reproduction": {"caveat": ["a"]}}, {"notes": ["a"]}, {"kernels": {"a": 1}}):
        with pytest.raises(TypeError):
            checked_json.read(Gathered, written | damage)


def test_the_size_under_the_slider_has_its_command(tmp_path: Path) -> None:
    """What lies beside the weights in the file is added: the command's size is the file's, not the plan's."""
    results = made_results.results()
    seen = page_of(results, tmp_path)
    beside = results["verdict"]["bytes"] - results["plan"]["bytes"]
    for stop in seen.data["map"]["stops"]:
        size = made_results.SIZE if stop["mine"] else str(stop["bytes"] + beside)
        assert stop["command"] == f"fewbits quantize tiny-llama -o tiny.gguf --size {size}"
    assert f"--size {made_results.SIZE}" in seen.words
    unverified = page_of(results | {"verdict": None}, tmp_path)
    other = next(stop for stop in unverified.data["map"]["stops"] if not stop["mine"])
    assert other["command"].endswith("bpw") and float(other["command"].split()[-1][:-3]) >= other["bits"]


def test_the_next_command_and_the_answers_are_there(tmp_path: Path) -> None:
    said = page_of(made_results.results(), tmp_path).words
    assert "llama-cli -m out/tiny.gguf -c 2048" in said and "2,048 tokens" in said
    assert "time there was" in said and "time there lived" in said and "2 tokens" in said
    left_out = {"answers": "it is too large"}
    assert "it is too large" in page_of(made_results.results() | {"answers": [], "left_out": left_out}, tmp_path).words


def test_a_comparison_has_a_page(tmp_path: Path) -> None:
    seen = page_of(made_results.comparison(), tmp_path)
    assert "On the frontier, where no other file is both smaller and closer: ours.gguf and large.gguf." in seen.words
    assert "x.bin" in seen.words and "no runtime takes" in seen.words and "On each kind of text" in seen.words
    assert {row["name"]: row["planned"] for row in seen.data["files"]} == {"theirs.gguf": False, "ours.gguf": True, "large.gguf": True}


@pytest.mark.parametrize("damage", [{"compared": 3}, {"compared": [{"name": "x"}]}, {"tokens": "many"}])
def test_a_damaged_comparison_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no results"):
        page_of(made_results.comparison() | damage, tmp_path)
