"""python -P -m tests.bucket_server PORT LOG: gs://bucket in memory, by gcp-storage-emulator.

Checkpoints are written on condition that nobody else has written meanwhile. The emulator does not
support conditions. It also omits the generation of an object that is read, and without it
checkpoints fail now and then on a busy machine. This server adds both, and a queue for any number
of connections. For each read of an object it adds a line "NAME BYTES" to the file LOG.
"""

import sys
from http import HTTPStatus
from http.server import HTTPServer

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects


def read(handler):
  """A read handler that logs, and returns the generation of the object."""

  def handle(request, response, storage):
    write = response.write_file

    def logged(content, **options):
      print(request.params['object_id'], len(content), file=LOG, flush=True)
      write(content, **options)

    response.write_file = logged
    handler(request, response, storage)
    if response.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
      response['x-goog-generation'] = generation(
        storage, request.params['bucket_name'], request.params['object_id']
      )

  return handle


def condition_kept(handler):
  """A write handler that refuses if the object does not have the given generation."""

  def handle(request, response, storage):
    content = request.data  # also if refused, so that the connection stays usable
    wanted, name = request.query.get('ifGenerationMatch'), request.query.get('name')
    if (
      content is not None
      and wanted
      and name
      and wanted[0] != generation(storage, request.params['bucket_name'], name[0])
    ):
      response.status = HTTPStatus.PRECONDITION_FAILED
    else:
      handler(request, response, storage)

  return handle


def generation(storage, bucket, name) -> str:
  """The generation of an object; 0 if it does not exist."""
  try:
    return storage.get_file_obj(bucket, name)['generation']
  except NotFound:
    return '0'


LOG = open(sys.argv[2], 'w')
CHANGED = {objects.get: read, objects.download: read, objects.insert: condition_kept}

if __name__ == '__main__':
  server.HANDLERS = tuple(
    (
      route,
      {verb: CHANGED.get(handler, lambda same: same)(handler) for verb, handler in verbs.items()},
    )
    for route, verbs in server.HANDLERS
  )
  HTTPServer.request_queue_size = 128
  server.create_server('127.0.0.1', int(sys.argv[1]), True, 'bucket').run()
