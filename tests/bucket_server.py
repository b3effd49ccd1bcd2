"""python -P -m tests.bucket_server PORT LOG: gs://bucket in memory, of gcp-storage-emulator.

Checkpoints are written on condition that nobody else has written meanwhile. The emulator knows
no conditions, and leaves out the generation of what it gives, without which checkpoints fail now
and then on a busy machine. Nor does it know ranges that count from the end, by which ArrayRecord
finds its footer. All are added here, and a queue for as many connections as come. Each reading of an
object is a line "NAME BYTES" of the file LOG.
"""

import sys
from http import HTTPStatus
from http.server import HTTPServer

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects


def read(handler):
  """A handler of reading that knows all ranges, logs, and tells the generation of the object."""
  def handle(request, response, storage):
    asked = request.get_header('range', '') or ''
    if asked.startswith('bytes=-'):
      size = int(storage.get_file_obj(request.params['bucket_name'],
                                      request.params['object_id'])['size'])
      header = request.get_header
      request.get_header = lambda name, default=None: (
          f'bytes={max(0, size - int(asked[7:]))}-' if name == 'range' else header(name, default))
    write = response.write_file
    response.write_file = lambda content, **options: (
        print(request.params['object_id'], len(content), file=LOG, flush=True),
        write(content, **options))
    handler(request, response, storage)
    if response.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
      response['x-goog-generation'] = generation(
          storage, request.params['bucket_name'], request.params['object_id'])
  return handle


def condition_kept(handler):
  """A handler of writing that refuses where the object is not of the generation given."""
  def handle(request, response, storage):
    content = request.data  # read in any case, for the sake of the connection
    wanted, name = request.query.get('ifGenerationMatch'), request.query.get('name')
    if content is not None and wanted and name and wanted[0] != generation(
        storage, request.params['bucket_name'], name[0]):
      response.status = HTTPStatus.PRECONDITION_FAILED
    else:
      handler(request, response, storage)
  return handle


def generation(storage, bucket, name) -> str:
  """That of an object, 0 where there is none."""
  try:
    return storage.get_file_obj(bucket, name)['generation']
  except NotFound:
    return '0'


LOG = open(sys.argv[2], 'w')
CHANGED = {objects.get: read, objects.download: read,
           objects.insert: condition_kept}

if __name__ == '__main__':
  server.HANDLERS = tuple(
      (route, {verb: CHANGED.get(handler, lambda same: same)(handler)
               for verb, handler in verbs.items()}) for route, verbs in server.HANDLERS)
  HTTPServer.request_queue_size = 128
  server.create_server('127.0.0.1', int(sys.argv[1]), True, 'bucket').run()
