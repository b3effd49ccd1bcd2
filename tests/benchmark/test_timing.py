"""Timing, progress and reasons."""

import time

import pytest

from sink_jax.benchmark.timing import Countdown, measure, reason, summary


class Sleeper:
  """Sleeps so long per call, and remembers how often it was called."""

  def __init__(self, seconds):
    self.seconds, self.calls = seconds, 0

  def __call__(self, n):
    began = time.perf_counter()
    time.sleep(self.seconds * n)
    self.calls += n
    return time.perf_counter() - began


def test_a_known_time_is_found():
  timing = measure(Sleeper(0.002), seconds=0.1)
  assert 1.9 < timing.min <= timing.median < 20  # milliseconds; a busy machine sleeps longer
  assert timing.repetitions >= 3 and timing.calls > 1 and timing.spread >= 0


def test_a_long_call_is_warmed_up_once_and_timed_once():
  sleeper = Sleeper(0.05)
  timing = measure(sleeper, seconds=0.01)
  assert sleeper.calls == 2 and timing.repetitions == timing.calls == 1
  assert timing.spread == 0


def test_short_calls_are_timed_in_batches():
  clock = []

  def elapsed(n):
    clock.append(n)
    return 0.001 * n

  timing = measure(elapsed, seconds=0.1, warmup=3, batch_seconds=0.02)
  assert clock == [1, 1, 1] + [20] * 5
  assert timing == (pytest.approx(1), pytest.approx(1), pytest.approx(0, abs=1e-9), 5, 20)


def test_summary_is_of_the_repetitions():
  timing = summary([0.004, 0.001, 0.002, 0.003, 0.005], calls=7)
  assert timing.named('call') == {
      'call_ms': pytest.approx(3), 'call_min_ms': pytest.approx(1),
      'call_spread_ms': pytest.approx(2), 'call_repetitions': 5, 'call_calls': 7}
  assert timing.of_each(2) == (*map(pytest.approx, (1.5, 0.5, 1)), 5, 14)


def test_progress_says_how_long_it_will_be(capsys):
  progress = Countdown(3, limit=100)
  progress.next('first')
  time.sleep(0.01)
  progress.next('second')
  lines = capsys.readouterr().err.splitlines()
  assert lines[0].startswith('[1/3] first') and 'left' not in lines[0]
  assert lines[1].startswith('[2/3] second') and 's left)' in lines[1]
  assert not progress.over() and not Countdown(1).over()
  assert Countdown(1, limit=-1).over()


@pytest.mark.parametrize('error, said', [
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory while\n trying'), 'out of memory'),
    (MemoryError('CUDA out of memory. Tried to'), 'out of memory'),
    (NotImplementedError('needs a TPU'), 'needs a TPU'),
    (ValueError('two\n lines'), 'ValueError: two lines'),
    (NotImplementedError(), 'NotImplementedError'),
])
def test_reasons_are_one_line(error, said):
  assert reason(error) == said
