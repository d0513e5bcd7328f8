"""`fewbits run` without a prompt: a chat, as it is piped and as it is typed."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fewbits
from fewbits import artifact as artifacts
from fewbits import embedded, formats, planning, targets
from fewbits import model as models
from fewbits.errors import InputError
from fewbits.inference.conversation import Conversation
from fewbits.inference.engine import open_for_texts
from fewbits.inference.text_model import Limits
from fewbits.progress import silent

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
PROMPT = "The function returns"


def made(folder: Path, template: str | None) -> Path:
    shutil.copytree(embedded.MODEL, folder / "float")
    settings = folder / "float" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | ({"chat_template": template} if template else {})))
    source = models.open(folder / "float")
    plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get("q8_0"), (), "rtn", None, None)
    return artifacts.quantize(source, plan, folder / "made", silent).path


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("chatty"), TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("plain"), None)


def opened(path: Path, context: int | None = None, kv: str | None = None) -> Any:
    return open_for_texts(path, context=context, kv=kv, progress=silent)


class TestConversation:
    def test_the_next_prompt_holds_all_turns(self, chatty: Path) -> None:
        model = opened(chatty)
        chat = Conversation(model, Limits(6), system="Be brief.")
        first = "".join(chat.answer("one"))
        list(chat.answer("two"))
        wanted = f"system: Be brief.\nuser: one\nassistant: {first}\nuser: two\nassistant:"
        assert chat.last is not None and model.tokenizer.decode(chat.last.prompt) == wanted
        chat.clear()
        list(chat.answer("three"))
        assert model.tokenizer.decode(chat.last.prompt) == "system: Be brief.\nuser: three\nassistant:"

    def test_without_a_template_a_text_goes_on(self, plain: Path) -> None:
        model = opened(plain)
        chat = Conversation(model, Limits(6))
        assert chat.plain
        first = "".join(chat.answer(PROMPT))
        assert first == fewbits.run(plain, PROMPT, max_tokens=6).text
        list(chat.answer("two"))
        assert chat.last is not None
        assert model.tokenizer.decode(chat.last.prompt, skip_special_tokens=True) == f"{PROMPT}{first}\ntwo".replace("\n\n", "\n")
        with pytest.raises(InputError, match="has no place"):
            Conversation(model, Limits(6), system="Be brief.")

    @pytest.mark.parametrize("kv", ["float", "int8"])
    def test_what_is_in_the_cache_is_not_read_again(self, plain: Path, kv: str) -> None:
        """And the answer is that of a model which reads all of it: but for the order of sums, so greedy choices agree."""
        model = opened(plain, kv=kv)
        chat = Conversation(model, Limits(8))
        first, second = ("".join(chat.answer(text)) for text in (PROMPT, "The list is"))
        assert chat.last is not None
        read = model.footprint().prompt_read
        assert read < len(chat.last.prompt) - 8 if kv == "float" else read <= len(chat.last.prompt)
        fresh = fewbits.run(plain, model.tokenizer.decode(chat.last.prompt, skip_special_tokens=True), max_tokens=8, kv=kv)
        assert fresh.text == second and first

    def test_the_oldest_turns_give_way(self, chatty: Path) -> None:
        model = opened(chatty, context=64)
        chat = Conversation(model, Limits(16))
        for i in range(8):
            list(chat.answer(f"number {i}"))
            assert chat.last is not None and len(chat.last.prompt) + len(chat.last.tokens) <= 64
        said = model.tokenizer.decode(chat.last.prompt)
        assert chat.left_out > 0 and "number 7" in said and "number 0" not in said and said.startswith("user: number")
        with pytest.raises(InputError, match="the context 64"):
            list(chat.answer("word " * 200))
        list(chat.answer("again"))  # the one that was refused is forgotten
        assert "word word" not in model.tokenizer.decode(chat.last.prompt)

    def test_an_answer_that_is_cut_stays_as_far_as_it_came(self, chatty: Path) -> None:
        model = opened(chatty)
        chat, came = Conversation(model, Limits(40)), list[str]()
        for text in chat.answer("one", lambda: len(came) >= 3):
            came.append(text)
        assert chat.last is not None and chat.last.ended == "cut" and len(chat.last.tokens) < 40
        list(chat.answer("two"))
        assert "".join(came) in model.tokenizer.decode(chat.last.prompt)


class TestPiped:
    def test_every_line_is_a_message(self, run: Any, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n\n/clear\n{PROMPT}\n/exit\nnever read\n"))
        code, out, err = run("run", plain, "-n", "6", "--stats")
        text = fewbits.run(plain, PROMPT, max_tokens=6).text
        assert code == 0 and out == f"{text}\n{text}\n" and err.count("no chat template") == 1 and "tokens/s" in err

    def test_a_message_that_is_too_long_leaves_the_chat_alive(self, run: Any, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 600 + f"\n{PROMPT}"))
        code, out, err = run("run", plain, "-n", "6")
        assert code == 0 and "and the context 512" in err and out.strip()

    def test_a_dash_reads_the_prompt_from_stdin(self, run: Any, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
        code, out, _ = run("run", plain, "-", "-n", "6")
        assert code == 0 and out == fewbits.run(plain, PROMPT, max_tokens=6).text + "\n"

    def test_what_a_chat_cannot_do_is_refused(self, run: Any, plain: Path, chatty: Path) -> None:
        code, _, err = run("run", plain, "--json")
        assert code == 2 and "needs a prompt" in err
        for words in ((plain, "hello", "--system", "x"), (chatty, "hello", "--system", "x", "--raw"), (plain, "--system", "x")):
            code, _, err = run("run", *words)
            assert code == 2 and "has no place" in err


class Typed:
    """The command line on a terminal."""

    def __init__(self, *words: object) -> None:
        self._terminal, inner = pty.openpty()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
        command = [sys.executable, "-c", _SLOWLY, *map(str, words)]
        self.process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True)
        os.close(inner)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        """As slowly as a person: between showing a prompt and waiting for keys, readline lets a signal wait for the next key."""
        time.sleep(0.5)
        self.process.send_signal(signal.SIGINT)

    def until(self, text: str, seconds: float = 30) -> str:
        """What came up to and with `text`."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.seen += os.read(self._terminal, 4096).decode()
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def more(self) -> None:
        """Waits for a few characters, which are an answer."""
        end = time.monotonic() + 30
        while len(self.seen.strip()) < 8 and time.monotonic() < end:
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.seen += os.read(self._terminal, 4096).decode()

    def ended(self) -> int:
        code = self.process.wait(20)
        os.close(self._terminal)
        return code


_SLOWLY = """
import sys, time
from fewbits.inference import stepped_model
choose = stepped_model.next_token
def slowly(*words):
    time.sleep(0.02)
    return choose(*words)
stepped_model.next_token = slowly
from fewbits import cli
cli.main()
"""


def test_ctrl_c_stops_the_answer_and_a_second_one_the_chat(plain: Path) -> None:
    chat = Typed("run", plain, "-n", "490")  # which take ten seconds
    chat.until("> ")
    chat.interrupt()  # nothing is being said: how to end is
    chat.until("Ctrl-C again, Ctrl-D or /exit ends the chat")
    chat.until("> ")
    chat.type(f"{PROMPT}\r")
    chat.until(" the")
    chat.interrupt()
    chat.until("> ", 8)
    chat.type("again\r")
    chat.until("again")
    chat.more()
    chat.interrupt()
    chat.until("> ", 8)
    chat.interrupt()
    assert chat.ended() == 0
