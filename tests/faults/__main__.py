"""python -m tests.faults [OUT_DIR] --rounds=200

Harms real training runs in every way that machines do, checks what is promised of each, and
writes OUT_DIR/faults.json and OUT_DIR/README.md. A row is written when it is done; rows that
passed with the same rounds and seed are kept, so the same command
resumes them. The workdir of a failed round is kept, and named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'

from tests.faults import damage, disk, elsewhere, pair, rivals, single
from tests.faults.plan import Plan
from tests.faults.table import Table

FAULTS = {
    'kill': single.killed, 'sigterm': single.stopped, 'kill-pair': pair.killed,
    'sigterm-pair': pair.stopped, 'damage': damage.checksummed, 'damage-json': damage.checksums,
    'damage-record': damage.records,
    'power-cut': damage.unchecksummed, 'damage-command': damage.through_the_command,
    'other-model': damage.other_model, 'disk-full': disk.full, 'read-only': disk.read_only,
    'rival': rivals.seen, 'rival-unseen': rivals.unseen, 'processes': elsewhere.processes,
    'mesh': elsewhere.mesh, 'jax': elsewhere.versions, 'absent': pair.absent,
}


def main(argv=None, faults=FAULTS):
  parser = argparse.ArgumentParser(prog='bash launch/faults.sh', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('out', nargs='?', default='results/faults', metavar='OUT_DIR')
  parser.add_argument('--rounds', type=int, default=200, help='kills of one process (%(default)s); '
                      'other rows make a part or a multiple of it')
  parser.add_argument('--seed', type=int, default=0, help='of all random moments and places')
  parser.add_argument('--only', default='', help=f'some of {", ".join(faults)}')
  parser.add_argument('--smoke', action='store_true', help='few rounds of short runs')
  parser.add_argument('--other_python', default='', metavar='PATH',
                      help='Python with another jax, for the row that changes versions')
  args = parser.parse_args(argv)
  names = args.only.split(',') if args.only else list(faults)
  if set(names) - set(faults) or args.rounds < 1:
    parser.error(f'--only takes some of {", ".join(faults)}, and --rounds at least 1')
  if args.other_python and not shutil.which(args.other_python):
    parser.error(f'--other_python={args.other_python}: there is no such program')
  rounds = min(args.rounds, 4) if args.smoke else args.rounds
  settings = {'rounds': rounds, 'seed': args.seed, 'smoke': args.smoke}
  command = (f'bash launch/faults.sh results/faults --rounds={rounds} --seed={args.seed}'
             + ' --smoke' * args.smoke + ' --other_python=PYTHON' * bool(args.other_python))
  table = Table(args.out, settings, faults, command)
  scratch = Path(tempfile.mkdtemp(prefix='sink_jax-faults-'))
  os.environ.pop('JAX_COMPILATION_CACHE_DIR', None)  # which would stand in the place of ours
  os.environ['SINK_JAX_COMPILE_CACHE'] = str(scratch / 'compiled')
  plan = Plan(scratch, rounds, args.seed, 600 if args.smoke else 3000, args.other_python)
  try:
    for number, name in enumerate(names, 1):
      told = f'row {number} of {len(names)}: {name}'
      if table.has(name):
        print(f'{told}: kept', file=sys.stderr, flush=True)
        continue
      print(told, file=sys.stderr, flush=True)
      row = faults[name](plan)
      table.add(row)
      result = row['skipped'] or ('passed' if row['passed'] else 'FAILED')
      print(f'{told}: {result}, {row["seconds"]:.0f} s', file=sys.stderr, flush=True)
  finally:
    _tidy(scratch)
  sys.exit(bool(table.failed()))


def _tidy(scratch):
  """Removes everything but what failed."""
  kept = list(scratch.glob('*/*-failed-*'))
  for path in sorted(scratch.rglob('*'), reverse=True):
    if any(path == k or k in path.parents or path in k.parents for k in kept):
      continue
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
  if not kept:
    scratch.rmdir()


if __name__ == '__main__':
  main()
