"""The threads of the native kernels: every share is done once, whoever calls, forks, throws or leaves."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbits import kernels
from fewbits.devices import processor

NATIVE = Path(kernels.__file__).parent / "native"

PROGRAM = r"""
#include "platform/threads.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

using fewbits::run_shares;

bool each_once(size_t shares) {  // plain ints: the race detector sees a share that is done twice, or not waited for
  std::vector<int> done(shares);
  run_shares(shares, [&](size_t i) { ++done[i]; });
  for (int times : done)
    if (times != 1) return false;
  return true;
}

bool nested() {
  std::vector<int> done(15);
  run_shares(3, [&](size_t i) { run_shares(5, [&, i](size_t j) { ++done[5 * i + j]; }); });
  for (int times : done)
    if (times != 1) return false;
  return true;
}

// Three shares at once, each on a thread of its own.
template <typename Then>
void together(const Then& then) {
  std::atomic<int> arrived = 0;
  run_shares(3, [&](size_t i) {
    for (++arrived; arrived < 3;) std::this_thread::yield();
    then(i);
  });
}

bool waits_for_the_last() {
  std::vector<int> done(3);
  const auto caller = std::this_thread::get_id();
  together([&](size_t i) {
    if (std::this_thread::get_id() != caller) std::this_thread::sleep_for(std::chrono::microseconds(20 + 100 * i));
    ++done[i];
  });
  return done == std::vector<int>(3, 1);
}

bool first_throw_arrives() {
  std::vector<int> done(6);
  std::string said;
  try {
    run_shares(6, [&](size_t i) {
      ++done[i];
      if (i == 2 || i == 5) throw std::runtime_error(std::to_string(i));
    });
  } catch (const std::runtime_error& thrown) {
    said = thrown.what();
  }
  for (int times : done)
    if (times != 1) return false;
  return said == "2";
}

bool flushes_as_the_caller_does() {  // a share on any thread has the caller's rounding modes
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  for (const unsigned flush : {0x8000u, 0u}) {
    _mm_setcsr((before & ~0x8000u) | flush);
    std::vector<float> halves(3);
    together([&](size_t i) {
      volatile float least = std::numeric_limits<float>::min();
      halves[i] = least / 2;
    });
    for (float half : halves)
      if ((half == 0) != (flush != 0)) return false;
  }
  _mm_setcsr(before);
#endif
  return true;
}

bool child_has_its_own() {
#if defined(__unix__)
  waits_for_the_last();  // its threads have started: a fork meanwhile would find locks of the sanitizer's held for good
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // the parent's threads are not here, new ones are needed
    _exit(waits_for_the_last() && each_once(5) ? 7 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 7 && each_once(3);
#else
  return true;
#endif
}

int main(int, char** arguments) {
  if (std::strcmp(arguments[1], "fork") == 0) return child_has_its_own() ? 0 : 5;
  for (size_t round = 0; round < 1000; ++round)
    if (!each_once(1 + round % 8)) return 1;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&] {
      for (size_t round = 0; round < 200; ++round) wrong += !each_once(1 + round % 5) + !nested();
    });
  for (std::thread& caller : callers) caller.join();
  if (wrong) return 2;
  for (int round = 0; round < 100; ++round)
    if (!first_throw_arrives() || !waits_for_the_last()) return 3;
  return flushes_as_the_caller_does() ? 0 : 4;  // workers still wait when the program ends
}
"""


@pytest.fixture(scope="module", params=["thread", "address"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("threads")
    (folder / "program.cc").write_text(PROGRAM)
    words = [compiler, "-std=c++20", f"-fsanitize={request.param}", "-pthread", f"-I{NATIVE}"]
    built = subprocess.run(
        [*words, "program.cc", str(NATIVE / "platform" / "threads.cc"), "-o", "program"], cwd=folder, capture_output=True, text=True
    )
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no {request.param} sanitizer")
    assert built.returncode == 0, built.stderr
    return folder / "program"


@pytest.mark.parametrize("what", ["calls", "fork"])
def test_shares_are_done_once_without_races_leaks_or_deadlocks(program: Path, what: str) -> None:
    settings = {"TSAN_OPTIONS": "die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=1"}
    ran = subprocess.run([program, what], env=settings, capture_output=True, text=True, timeout=60)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the sanitizer does not run on this system")
    assert ran.returncode == 0, ran.stderr


def quantized(x: Tensor, threads: int) -> bytes:
    codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
    processor.native().quantize_tokens("scalar", x.numpy(), codes.numpy(), scale.numpy(), threads)
    return codes.numpy().tobytes() + scale.numpy().tobytes()


@pytest.fixture
def x() -> Tensor:
    assert processor.native_missing() is None
    return torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))  # eight shares at most


def test_callers_at_the_same_time_get_what_each_gets_alone(x: Tensor) -> None:
    alone = quantized(x, 1)
    assert alone != quantized(x + 1, 1)
    results: list[bytes] = []
    callers = [threading.Thread(target=lambda n=n: results.extend(quantized(x, n) for _ in range(20))) for n in (2, 7, 3, 2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert len(results) == 80
    assert set(results) == {alone}


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_forked_child_computes_and_so_does_its_parent(x: Tensor) -> None:
    before = quantized(x, 3)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(quantized(x, 3) == before))
    child.start()
    child.join(60)
    assert child.exitcode == 0, "the child waits for threads that only its parent has"
    assert answers.get()
    assert quantized(x, 3) == before
