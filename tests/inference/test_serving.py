"""`fewbits serve`, asked by OpenAI's own client over loopback."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import fewbits
from fewbits import artifact as artifacts
from fewbits import embedded, formats, planning, targets
from fewbits import model as models
from fewbits.errors import InputError
from fewbits.inference import stepped_model
from fewbits.inference.serving import server, turns
from fewbits.inference.serving.app import _Pending
from fewbits.inference.serving.turns import FullError, Turn, Turns
from fewbits.inference.text_model import Continuation
from fewbits.progress import silent
from fewbits.store.heap import return_free_memory

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
PROMPT = "The function returns"


def chat_model(folder: Path) -> Path:
    """The embedded model with a chat template, in q8_0."""
    shutil.copytree(embedded.MODEL, folder / "float")
    settings = folder / "float" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    source = models.open(folder / "float")
    plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get("q8_0"), (), "rtn", None, None)
    return artifacts.quantize(source, plan, folder / "chatty", silent).path


@contextmanager
def serving(path: Path, **options: Any) -> Iterator[server.Served]:
    ready, told = threading.Event(), list[server.Served]()

    def on_ready(served: server.Served) -> None:
        told.append(served)
        ready.set()

    thread = threading.Thread(target=fewbits.serve, args=(path,), kwargs={"port": 0, "on_ready": on_ready, **options})
    thread.start()
    assert ready.wait(60)
    try:
        yield told[0]
    finally:
        told[0].stop()
        thread.join(20)
        assert not thread.is_alive()


def client(served: server.Served, key: str = "none", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key=key, max_retries=retries, timeout=60)


def health(served: server.Served) -> dict[str, Any]:
    with urllib.request.urlopen(served.url.removesuffix("/v1") + "/health", timeout=10) as answer:
        return json.load(answer)


def soon(holds: Callable[[], bool], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def served(chatty: Path) -> Iterator[server.Served]:
    with serving(chatty) as found:
        yield found


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every target can hold."""
    source = models.open(embedded.MODEL)
    plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get("int4_g32"), (), "rtn", None, None)
    return artifacts.quantize(source, plan, tmp_path_factory.mktemp("int4") / "made", silent).path


@pytest.fixture
def log(served: server.Served, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:  # noqa: ARG001 - which sets up loggers
    """What the server logs, which keeps it to itself."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every token takes 20 ms, so that there is time to go away; the tokens that were computed."""
    computed, choose = list[int](), stepped_model.next_token

    def slowly(*words: Any) -> int:
        time.sleep(0.02)
        computed.append(choose(*words))
        return computed[-1]

    monkeypatch.setattr(stepped_model, "next_token", slowly)
    return computed


class TestAnswers:
    def test_a_completion_is_what_run_writes(self, served: server.Served, chatty: Path) -> None:
        wanted = fewbits.run(chatty, PROMPT, max_tokens=12, raw=True)
        said = client(served).completions.create(model="chatty", prompt=PROMPT, max_tokens=12, temperature=0)
        assert said.choices[0].text == wanted.text and said.choices[0].finish_reason == "length" and said.object == "text_completion"
        assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (wanted.stats.prompt_tokens, 12)
        assert said.usage.total_tokens == wanted.stats.prompt_tokens + 12
        tokens = models.open(embedded.MODEL).tokenizer(PROMPT)["input_ids"]
        assert client(served).completions.create(model="chatty", prompt=tokens, max_tokens=12, temperature=0).choices == said.choices

    def test_a_chat_goes_through_the_template(self, served: server.Served, chatty: Path) -> None:
        wanted = fewbits.run(chatty, PROMPT, system="Be brief.", max_tokens=12)
        assert wanted.text != fewbits.run(chatty, PROMPT, max_tokens=12).text
        messages: Any = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        ]
        said = client(served).chat.completions.create(model="chatty", messages=messages, max_completion_tokens=12, temperature=0)
        assert said.choices[0].message.content == wanted.text and said.choices[0].message.role == "assistant"
        assert said.usage.prompt_tokens == wanted.stats.prompt_tokens

    @pytest.mark.parametrize("chat", [True, False])
    def test_streamed_pieces_make_the_whole(self, served: server.Served, chat: bool) -> None:
        asked: dict[str, Any] = {"model": "chatty", "max_tokens": 20, "temperature": 0.9, "top_p": 0.9, "seed": 7}
        asked |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
        create = client(served).chat.completions.create if chat else client(served).completions.create
        whole = create(**asked)
        pieces = list(create(**asked, stream=True, stream_options={"include_usage": True}))
        texts = [(each.choices[0].delta.content if chat else each.choices[0].text) or "" for each in pieces if each.choices]
        assert "".join(texts) == (whole.choices[0].message.content if chat else whole.choices[0].text) and len(texts) > 3
        assert pieces[-1].choices == [] and pieces[-1].usage == whole.usage and pieces[-2].choices[0].finish_reason == "length"
        assert create(**asked | {"seed": 8}).choices != whole.choices

    def test_it_ends_before_a_stop(self, served: server.Served, chatty: Path) -> None:
        text = fewbits.run(chatty, PROMPT, max_tokens=20, raw=True).text
        stop = text[5:12]  # begins and ends within tokens
        asked: dict[str, Any] = {"model": "chatty", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stop": ["never said", stop]}
        said = client(served).completions.create(**asked)
        assert said.choices[0].text == text[: text.index(stop)] and said.choices[0].finish_reason == "stop"
        streamed = "".join(each.choices[0].text for each in client(served).completions.create(**asked, stream=True))
        assert streamed == said.choices[0].text
        half = client(served).completions.create(**asked | {"stop": text[-3:] + "and more"})  # only begun: nothing is lost
        assert half.choices[0].text == text

    def test_the_model_is_listed(self, served: server.Served) -> None:
        assert [each.id for each in client(served).models.list()] == ["chatty"]
        assert client(served).models.retrieve("chatty").id == "chatty"
        assert health(served) == {"status": "ok", "model": "chatty", "running": 0, "waiting": 0, "queue": 16}

    def test_an_answer_goes_on_to_the_end_of_the_context(self, chatty: Path) -> None:
        with serving(chatty, context=32) as small:
            said = client(small).chat.completions.create(
                model="chatty", messages=[{"role": "user", "content": PROMPT}], temperature=0, extra_body={"seed": 1}
            )
            assert said.choices[0].finish_reason in ("length", "stop") and said.usage.total_tokens <= 32


class TestErrors:
    @pytest.mark.parametrize(
        ("asked", "kind", "param", "code"),
        [
            ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
            ({"temperature": 3}, openai.BadRequestError, "temperature", "invalid_value"),
            ({"top_p": 0}, openai.BadRequestError, "top_p", "invalid_value"),
            ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "invalid_value"),
            ({"max_tokens": "9"}, openai.BadRequestError, "max_tokens", "invalid_type"),
            ({"n": 2}, openai.BadRequestError, "n", "unsupported_parameter"),
            ({"frequency_penalty": 0.5}, openai.BadRequestError, "frequency_penalty", "unsupported_parameter"),
            ({"stop": list("abcde")}, openai.BadRequestError, "stop", "invalid_value"),
            ({"prompt": ["a", "b"]}, openai.BadRequestError, "prompt", "invalid_value"),
            ({"prompt": [10**6]}, openai.BadRequestError, None, None),
            ({"prompt": "word " * 600}, openai.BadRequestError, None, "context_length_exceeded"),
            ({"extra_body": {"min_q": 1}}, openai.BadRequestError, "min_q", "unknown_parameter"),
        ],
    )
    def test_what_cannot_be_done_is_refused(
        self, served: server.Served, asked: Any, kind: Any, param: str | None, code: str | None
    ) -> None:
        for stream in (False, True):
            with pytest.raises(kind) as refused:
                client(served).completions.create(**{"model": "chatty", "prompt": "a", "max_tokens": 2, **asked}, stream=stream)
            assert refused.value.param == param and refused.value.code == code and refused.value.body["message"]

    def test_the_log_is_for_what_went_wrong_here(self, served: server.Served, log: pytest.LogCaptureFixture) -> None:
        """Not for requests that were."""
        with pytest.raises(openai.BadRequestError):
            client(served).completions.create(model="chatty", prompt="word " * 600)
        assert not log.records

    def test_what_fails_within_is_an_error_500_and_the_next_request_is_fine(
        self, served: server.Served, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
    ) -> None:
        with monkeypatch.context() as broken, pytest.raises(openai.InternalServerError, match="see the server's log"):
            broken.setattr(stepped_model, "next_token", lambda *_: 1 // 0)
            client(served).completions.create(model="chatty", prompt="a")
        assert soon(lambda: "ZeroDivisionError" in log.text)
        assert client(served).completions.create(model="chatty", prompt="a", temperature=1e-30).choices

    def test_messages_that_are_none_are_refused(self, served: server.Served) -> None:
        for messages in ([], [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]):
            with pytest.raises(openai.BadRequestError, match="message"):
                client(served).chat.completions.create(model="chatty", messages=messages)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("path", "body", "kind", "status"),
        [
            ("/v1/completions", b"{", "application/json", 400),
            ("/v1/completions", b"[]", "application/json", 400),
            ("/v1/completions", b"[" * 100_000, "application/json", 400),
            ("/v1/completions", b'{"prompt": "a"}', "text/plain", 415),
            ("/v1/completions", b" " * (9 << 20), "application/json", 413),
            ("/v1/embeddings", b"{}", "application/json", 404),
            ("/health", b"{}", "application/json", 405),
        ],
    )
    def test_broken_requests_get_openai_s_document(self, served: server.Served, path: str, body: bytes, kind: str, status: int) -> None:
        asked = urllib.request.Request(served.url.removesuffix("/v1") + path, body, {"Content-Type": kind})
        with pytest.raises((urllib.error.HTTPError, ConnectionError, urllib.error.URLError)) as refused:
            urllib.request.urlopen(asked, timeout=10)
        if isinstance(refused.value, urllib.error.HTTPError):  # while it still sends, a client may not see the answer
            assert refused.value.code == status and json.load(refused.value)["error"]["message"]
        else:
            assert status == 413

    def test_a_model_without_a_template_says_so(self, tmp_path: Path) -> None:
        source = models.open(embedded.MODEL)
        plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get("q8_0"), (), "rtn", None, None)
        made = artifacts.quantize(source, plan, tmp_path / "plain", silent)
        with serving(made.path, api_key="secret", name="other") as found:
            with pytest.raises(openai.BadRequestError, match="no chat template"):
                client(found, "secret").chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}])
            assert client(found, "secret").completions.create(model="other", prompt="a", max_tokens=2).usage.completion_tokens == 2
            for wrong in ("none", "secret2"):
                with pytest.raises(openai.AuthenticationError):
                    client(found, wrong).models.list()
            assert health(found)["status"] == "ok"


class TestTurns:
    def test_a_client_that_goes_away_stops_its_generation(self, served: server.Served, slow: list[int]) -> None:
        asked: dict[str, Any] = {"model": "chatty", "prompt": PROMPT, "max_tokens": 400, "temperature": 1.9}
        stream = client(served).completions.create(**asked, stream=True)
        for _, _ in zip(range(3), stream, strict=False):
            pass
        stream.close()
        assert soon(lambda: health(served)["running"] == 0, 5) and len(slow) < 300
        slow.clear()
        with pytest.raises(openai.APITimeoutError):
            client(served).with_options(timeout=0.3).completions.create(**asked)
        assert soon(lambda: health(served)["running"] == 0, 5) and len(slow) < 300

    def test_beyond_the_queue_is_429_with_a_time(self, chatty: Path, slow: list[int]) -> None:
        with serving(chatty, queue=1) as small, ThreadPoolExecutor(2) as pool:
            asked: dict[str, Any] = {"model": "chatty", "prompt": PROMPT, "max_tokens": 40, "temperature": 1.9, "seed": 1}
            first = [pool.submit(client(small).completions.create, **asked) for _ in range(2)]
            assert soon(lambda: health(small)["waiting"] == 1)
            with pytest.raises(openai.RateLimitError) as refused:
                client(small).completions.create(**asked)
            assert int(refused.value.response.headers["retry-after"]) >= 1 and refused.value.code == "queue_full"
            again = client(small, retries=5).completions.create(**asked)  # their client waits as long as it is told
            texts = {each.result().choices[0].text for each in first} | {again.choices[0].text}
            assert len(texts) == 1 and slow

    def test_who_leaves_the_queue_gives_the_place_up(self) -> None:
        gate, begun, said = threading.Event(), threading.Event(), list[Any]()

        def work(cut: Callable[[], bool]) -> Iterator[str]:
            begun.set()
            gate.wait(10)
            yield str(cut())

        line = Turns(1)
        first, second, third = (Turn(work, said.append) for _ in range(3))
        line.add(first)
        assert begun.wait(10)
        line.add(second)
        with pytest.raises(FullError):
            line.add(third)
        line.withdraw(second)
        line.add(third)
        gate.set()
        assert soon(lambda: len(said) == 4)
        line.close()
        assert said == ["False", None, "False", None]
        with pytest.raises(turns.StoppedError):
            line.add(first)

    def test_a_turn_that_fails_leaves_the_next_one_alone(self) -> None:
        said, line = list[Any](), Turns(4)

        def fails(cut: Callable[[], bool]) -> Iterator[str]:  # noqa: ARG001
            raise ValueError("broken")
            yield

        line.add(Turn(fails, said.append))
        line.add(Turn(lambda cut: iter(["fine"]), said.append))  # noqa: ARG005
        assert soon(lambda: len(said) == 3)
        line.close()
        assert isinstance(said[0], ValueError) and said[1:] == ["fine", None]


def test_two_hundred_requests_leave_nothing_behind(chatty: Path) -> None:
    """Some are cut off in mid-stream; every other one is answered or told to come again."""

    def ask(i: int) -> str:
        asked: dict[str, Any] = {"model": "chatty", "prompt": f"{PROMPT} {i}", "max_tokens": 24, "temperature": 0.5, "seed": i}
        try:
            if i % 5 == 0:
                with here.completions.create(**asked | {"max_tokens": 400}, stream=True) as stream:
                    next(iter(stream))
                return "cut"
            if i % 2:
                said = here.completions.create(**asked)
                assert said.usage.completion_tokens == 24 or said.choices[0].finish_reason == "stop"
                return "answered"
            pieces = list(here.completions.create(**asked, stream=True))
            assert pieces[-1].choices[0].finish_reason in ("length", "stop")
            return "answered"
        except openai.RateLimitError as full:
            assert int(full.response.headers["retry-after"]) >= 1
            return "429"

    def patient(i: int) -> Counter[str]:
        """Comes again as long as it is told to: without the wait of a second, which the test has no time for."""
        ends = [ask(i)]
        while ends[-1] == "429":
            time.sleep(0.05)
            ends.append(ask(i))
        return Counter(ends)

    def left() -> int:
        gc.collect()
        return sum(type(each) in (Turn, Continuation, _Pending) for each in gc.get_objects())

    with serving(chatty, queue=3) as small, client(small) as here:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(patient, range(10)))
        threads, files, memory = threading.active_count(), open_files(), resident()
        with ThreadPoolExecutor(8) as pool:
            ends = sum(pool.map(patient, range(200)), Counter[str]())
        assert ends["answered"] == 160 and ends["cut"] == 40 and ends["429"] > 0, ends
        assert soon(lambda: health(small)["running"] == health(small)["waiting"] == 0)
        assert soon(lambda: left() == 0)
        assert soon(lambda: threading.active_count() <= threads and open_files() <= files)
        assert resident() - memory < 20e6  # a KV cache of this context is 1 MB: not even half of the 40 that were cut left theirs


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident() -> int:
    return_free_memory()  # what eight threads freed and the allocator still holds, in a process that ran a thousand tests before
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ctrl_c_ends_the_server_in_the_middle_of_an_answer(chatty: Path) -> None:
    words = [sys.executable, "-m", "fewbits.cli", "serve", str(chatty), "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        assert process.stderr is not None
        while "serving chatty at" not in (line := process.stderr.readline()):
            assert line, "it ended"
        here = openai.OpenAI(base_url=line.partition(" at ")[2].split()[0], api_key="none", max_retries=0)
        stream = here.completions.create(model="chatty", prompt=PROMPT, max_tokens=480, temperature=1.9, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=20)[1]
        assert process.returncode == 0 and "Traceback" not in said


class TestWhatIsServed:
    def test_what_others_serve_names_their_command(self, run: Any, tmp_path: Path) -> None:
        folder = tmp_path / "m.ct"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        code, _, err = run("serve", folder)
        assert code == 2 and f"vllm serve {folder}" in err.replace("\n", "")
        (tmp_path / "m.onnx").write_bytes(b"")
        code, _, err = run("serve", tmp_path / "m.onnx")
        assert code == 2 and "onnx-genai" in err
        (tmp_path / "broken.gguf").write_bytes(b"GGUF")
        code, _, err = run("serve", tmp_path / "broken.gguf", "--port", "0")
        assert code == 2 and "llama-server -m" in err
        code, _, err = run("serve", tmp_path / "none.gguf")
        assert code == 2 and "does not exist" in err

    def test_a_port_that_is_taken_is_said_before_loading(self, run: Any, served: server.Served, chatty: Path) -> None:
        port = served.url.rpartition(":")[2].removesuffix("/v1")
        code, _, err = run("serve", chatty, "--port", port)
        assert code == 2 and f"port {port}" in err and "--port" in err

    def test_the_extra_is_named_where_it_is_missing(self, run: Any, chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "find_spec", lambda _: None)
        code, _, err = run("serve", chatty)
        assert code == 2 and 'pip install "fewbits[serve]"' in err

    def test_an_address_beyond_this_machine_is_warned_of(self, capsys: pytest.CaptureFixture[str]) -> None:
        from fewbits.reporting.terminal import generation

        told = server.Served("http://0.0.0.0:1/v1", "m", 32, "native", True, lambda: None)
        generation.serving(told)
        assert "no authentication" in " ".join(capsys.readouterr().err.split())
        generation.serving(told._replace(open_to_others=False))
        assert "authentication" not in capsys.readouterr().err
        assert [server._is_loopback(each) for each in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "192.168.1.2")] == [True] * 3 + [
            False
        ] * 2

    @pytest.mark.parametrize("to", ["gguf", "onnx-genai", pytest.param("mlx", marks=pytest.mark.slow)])
    def test_every_kind_goes_through_its_runtime(self, to: str, int4: Path, tmp_path: Path) -> None:
        pytest.importorskip({"onnx-genai": "onnxruntime_genai", "mlx": "mlx_lm"}.get(to, "gguf"))
        path = fewbits.export(int4, tmp_path, to=to)
        wanted = fewbits.run(path, PROMPT, max_tokens=4, raw=True)
        with serving(path) as found:
            assert {"gguf": "native", "onnx-genai": "onnxruntime-genai", "mlx": "mlx-lm"}[to] in found.engine
            said = client(found).completions.create(model=path.name, prompt=PROMPT, max_tokens=4, temperature=0)
            assert said.choices[0].text == wanted.text

    def test_the_name_is_that_of_the_output(self) -> None:
        assert server.name_of(Path("x/m.gguf.work/artifact")) == server.name_of(Path("x/m.gguf")) == "m.gguf"
        with pytest.raises(InputError, match="does not exist"):
            server.refuse_what_others_serve(Path("nowhere"))
