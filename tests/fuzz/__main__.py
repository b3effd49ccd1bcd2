"""python -m tests.fuzz --inputs=100000 --out=results/faults/fuzz.json

Reads hostile input of every kind: config strings, configs, tokenizers, JSON lines, published
checkpoints, run folders, chunk caches. Every input has to end within 10 seconds with a value
or a refusal that says something; it runs no code, reaches no network, writes nowhere but in
its scratch folder, and stays within the memory. A failing input is written beside the JSON;
--replay=FILE reads it again. The same command resumes it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
from pathlib import Path

from tests.fuzz import kinds, tables
from tests.fuzz.pool import Batch

_LEAST = 1000  # inputs of a kind, where there are as many for each


def main(argv=None):
  parser = argparse.ArgumentParser(prog='python -m tests.fuzz', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--inputs', type=int, default=10_000,
                      help='of all kinds (default %(default)s)')
  parser.add_argument('--each', type=int, help='so many of each kind, in place of --inputs')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--kinds', default=','.join(kinds.NAMES), help='default: %(default)s')
  parser.add_argument('--processes', type=int, default=1, help='batches at a time')
  parser.add_argument('--out', help='JSON file; the table goes beside it, as .md')
  parser.add_argument('--replay', help='read this stored input only')
  args = parser.parse_args(argv)
  if args.replay:
    kind = Path(args.replay).stem.rsplit('-', 1)[0]
    found = tables.summary([Batch(kind, 0, 1).replay(args.replay).as_record()], '', 0)
    print(tables.markdown(found))
    sys.exit(bool(found['failures']))
  names = args.kinds.split(',')
  if not args.out or set(names) - set(kinds.NAMES) or args.processes < 1 or args.inputs < 1:
    parser.error(f'--out is needed, and --kinds out of {", ".join(kinds.NAMES)}')
  command = 'python -m tests.fuzz ' + ' '.join(argv or sys.argv[1:])
  batches = _batches(names, args.inputs, args.each, args.seed)
  out = Path(args.out)
  out.parent.mkdir(parents=True, exist_ok=True)
  records = _run(batches, args.processes, out)
  found = tables.summary(records, command, args.seed)
  out.write_text(json.dumps(found, indent=1) + '\n')
  out.with_suffix('.md').write_text(tables.markdown(found))
  _partial(out).unlink()
  print(tables.markdown(found))
  sys.exit(bool(found['failures']))


def _batches(names, inputs, each, seed):
  """(kind, seed, count) of every batch, the kinds taking turns."""
  loaded = {name: kinds.load(name) for name in names}
  least = min(_LEAST, inputs // len(names))
  total = sum(kind.share for kind in loaded.values())
  batches = []
  for place, (name, kind) in enumerate(loaded.items()):
    count = each or max(least, (inputs - least * len(names)) * kind.share // total + least)
    starts = range(0, count, kind.batch)
    batches += [((i + 1) / len(starts), name, seed * 1_000_000_007 + place * 100_003 + i,
                 min(kind.batch, count - start)) for i, start in enumerate(starts)]
  return [batch[1:] for batch in sorted(batches)]


def _partial(out):
  return out.with_suffix('.partial.jsonl')


def _run(batches, processes, out):
  """The records of all batches; those that are in the partial file are not run again."""
  records = {}
  if _partial(out).exists():
    lines = [json.loads(line) for line in _partial(out).read_text().splitlines()]
    records = {(r['kind'], r['seed'], r['count']): r for r in lines}
  left = [batch for batch in batches if batch not in records]
  known = sum(batch[2] for batch in batches if batch in records)
  total, start = sum(batch[2] for batch in batches), time.monotonic()
  done = 0
  with concurrent.futures.ThreadPoolExecutor(processes) as pool:
    running = [pool.submit(_confirmed, batch, out) for batch in left]
    for future in concurrent.futures.as_completed(running):
      if future.exception():
        pool.shutdown(cancel_futures=True)  # else the error would come after all the others
      record = future.result()
      records[record['kind'], record['seed'], record['count']] = record
      with open(_partial(out), 'a') as file:
        file.write(json.dumps(record) + '\n')
      done += record['count']
      rate = (time.monotonic() - start) / done
      failures = sum(len(r['failures']) for r in records.values())
      print(f'[{known + done:,}/{total:,}] {record["kind"]}: {len(record["failures"])} failures, '
            f'{failures} in all; {rate * (total - known - done) / 60:.1f} min left',
            file=sys.stderr, flush=True)
  return [records[batch] for batch in batches]


def _confirmed(batch, out):
  """The record of a batch; slowness and memory count where the input alone shows them too."""
  made = Batch(*batch).run()
  kept, seen = [], set()
  for failure in made.failures:
    path = out.parent / f'{out.stem}-inputs' / failure['file']
    path.parent.mkdir(exist_ok=True)
    path.write_text(failure['input'])
    if failure['what'][:60] not in seen and not Batch(made.kind, 0, 1).replay(path).failures:
      path.unlink()
      made.outcomes[failure['outcome']] -= 1
      made.outcomes['accepted or refused when read alone'] += 1
      continue
    if failure['what'][:60] not in seen:
      print(f'{path}: {failure["what"]}', file=sys.stderr, flush=True)
    seen.add(failure['what'][:60])
    kept.append(failure)
  made.failures = kept
  return made.as_record()


if __name__ == '__main__':
  main()
