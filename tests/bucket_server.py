"""python -P -m tests.bucket_server PORT: gs://bucket in memory, of gcp-storage-emulator.

Checkpoints are written on condition that nobody else has written meanwhile. The emulator knows
no conditions, and leaves out the generation of what it gives, without which checkpoints fail now
and then on a busy machine. Both are added here, and a queue for as many connections as come.
"""

import sys
from http import HTTPStatus
from http.server import HTTPServer

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects


def generation_given(handler):
  """A handler of reading that tells the generation of the object, as the service does."""
  def handle(request, response, storage):
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


CHANGED = {objects.get: generation_given, objects.download: generation_given,
           objects.insert: condition_kept}

if __name__ == '__main__':
  server.HANDLERS = tuple(
      (route, {verb: CHANGED.get(handler, lambda same: same)(handler)
               for verb, handler in verbs.items()}) for route, verbs in server.HANDLERS)
  HTTPServer.request_queue_size = 128
  server.create_server('127.0.0.1', int(sys.argv[1]), True, 'bucket').run()
