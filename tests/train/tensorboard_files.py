"""TensorBoard's event files, read as TensorBoard does."""

import struct

from tensorboardX.proto.event_pb2 import Event, SessionLog


def shown(files):
  """{tag: [step, ...]} of the contents of files in order; a start drops its step and later ones."""
  points = {}
  for data in files:
    for event in _events(data):
      if event.HasField('session_log') and event.session_log.status == SessionLog.START:
        points = {tag: [s for s in steps if s < event.step] for tag, steps in points.items()}
      for value in event.summary.value:
        points.setdefault(value.tag, []).append(event.step)
  return points


def _events(data):
  while data:
    size, = struct.unpack_from('<Q', data)
    yield Event.FromString(data[12:12 + size])
    data = data[16 + size:]
