"""``/v1/files``: uploads go to the disk as they come."""

import asyncio
import time
from dataclasses import replace

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from caravan_dialects.api.errors import (
    BodyTimeoutError,
    BrokenBodyError,
    FileRoomError,
    MalformedFormError,
    UnknownEntryError,
    UnsupportedMediaError,
)
from caravan_dialects.api.openai.bulk.rules import (
    MAX_PAGE,
    PURPOSES,
    check_life,
    page_of_query,
    purpose_error,
)
from caravan_dialects.api.openai.bulk.schema import DeletedFile, FileForm, FileList, FileObject, file_object
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.rules import missing_field_error
from caravan_dialects.bulk.file_table import Upload
from caravan_dialects.bulk.records import StoredFile
from caravan_dialects.conversations.nodes import new_id
from caravan_router.http.bulk.running import BULK
from caravan_router.http.server.form import FORM
from caravan_router.http.server.repeated import REPEATABLE, keyed_id
from caravan_router.http.server.route import BODY_ERRORS, STORE_ERRORS, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE, owner_of
from caravan_router.http.server.tags import Tag

_PATH = "/v1/files"
_ONE = f"{_PATH}/{{file_id}}"
_ID = Parameter(name="file_id", place="path", description="Id of a file")
_MOST_TEXT_BYTES, _MOST_FIELDS, _MOST_NAME_CHARACTERS = 1_024, 16, 255
_CHUNK_BYTES = 1 << 18

ROUTES = Routes(OPENAI, tag=Tag.FILES)


@ROUTES.route(
    "POST",
    _PATH,
    "Upload a file, such as the requests of a batch",
    parameters=(REPEATABLE,),
    form=FileForm,
    reply=FileObject,
    errors=BODY_ERRORS,
)
async def upload_file(request: web.Request) -> web.Response:
    if request.content_type != FORM:
        raise UnsupportedMediaError(request.content_type, FORM)
    store, owner = request.app[BULK], owner_of(request)
    file_id = keyed_id(request, "file")
    async with store.uploading() as upload:
        known = None if file_id is None else await store.file(owner, file_id)
        room = await store.room(owner)
        # What was uploaded before is read as well, as its client expects, and not kept twice.
        fields = await _read(request, upload, room if known is None else room + known.size)
        if known is not None:
            return json_reply(file_object(known))
        file = _file_of(fields, owner, upload.size, store.settings.life_s)
        if file_id is not None:
            file = replace(file, id=file_id)
        kept = await store.keep(upload, file)
    if not isinstance(kept, StoredFile):
        raise FileRoomError(kept)
    return json_reply(file_object(kept))


async def _read(request: web.Request, upload: Upload, room: int) -> dict[str, str]:
    """Write the file of a form to ``upload``, and return its name and the other fields.

    Raises MalformedFormError, BodyTimeoutError, BrokenBodyError, FileRoomError.
    """
    limit_s, fields = request.app[STATE].limits.body_timeout_s, dict[str, str]()
    try:
        reader = await request.multipart()
        while True:
            # A large file may take its time, as long as something comes.
            async with asyncio.timeout(limit_s):
                part = await reader.next()
            if part is None:
                return fields
            if not isinstance(part, BodyPartReader) or part.name is None or len(fields) >= _MOST_FIELDS:
                raise MalformedFormError(f"it must have at most {_MOST_FIELDS} parts, each with a name")
            if part.name == "file" and "file" in fields:
                raise MalformedFormError("it has two files")
            text = bytearray()
            while True:
                async with asyncio.timeout(limit_s):
                    chunk = await part.read_chunk(_CHUNK_BYTES)
                if not chunk:
                    break
                if part.name == "file":
                    if upload.size + len(chunk) > room:
                        raise FileRoomError(room)
                    await request.app[BULK].write(upload, chunk)
                else:
                    text += chunk
                    if len(text) > _MOST_TEXT_BYTES:
                        raise MalformedFormError(f"its field {part.name[:40]!r} has over {_MOST_TEXT_BYTES} bytes")
            name = (part.filename or "file")[:_MOST_NAME_CHARACTERS]
            fields[part.name] = name if part.name == "file" else text.decode()
    except TimeoutError as error:
        raise BodyTimeoutError(limit_s) from error
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
        raise MalformedFormError(str(error)[:200] or "it ends early") from error
    except web.RequestPayloadError as error:
        raise BrokenBodyError from error


def _file_of(fields: dict[str, str], owner: str, size: int, life_s: float) -> StoredFile:
    """Raises ValidationError."""
    for name in ("file", "purpose"):
        if name not in fields:
            raise missing_field_error(name)
    purpose, now = fields["purpose"], time.time()
    if purpose not in PURPOSES:
        raise purpose_error(purpose)
    seconds = fields.get("expires_after[seconds]")
    if seconds is not None:
        given = int(seconds) if seconds.isascii() and seconds.isdigit() and len(seconds) < 10 else -1
        check_life("expires_after", fields.get("expires_after[anchor]", ""), given)
        life_s = float(given)
    return StoredFile(
        id=new_id("file"),
        owner=owner,
        purpose=purpose,
        name=fields["file"],
        size=size,
        created=now,
        expires=now + life_s,
    )


_PAGE = (
    Parameter(name="after", place="query", description="Id of the entry before the first one of the page"),
    Parameter(
        name="limit", place="query", description=f"Maximum number of entries: 1 to {MAX_PAGE}, default {MAX_PAGE}"
    ),
    Parameter(name="order", place="query", description="`desc`, the newest first (default), or `asc`"),
    Parameter(name="purpose", place="query", description="Only files of this purpose"),
)


@ROUTES.route("GET", _PATH, "List the files", parameters=_PAGE, reply=FileList, errors=(400, *STORE_ERRORS))
async def list_files(request: web.Request) -> web.Response:
    page = page_of_query(request.query, MAX_PAGE, MAX_PAGE)
    files = await request.app[BULK].files(owner_of(request), page, request.query.get("purpose"))
    shown = [file_object(file) for file in files[: page.limit]]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_reply(FileList(data=shown, has_more=len(files) > page.limit, first_id=first, last_id=last))


async def file_of(request: web.Request, file_id: str) -> StoredFile:
    """Return a file of the client. Raises UnknownEntryError."""
    found = await request.app[BULK].file(owner_of(request), file_id)
    if found is None:
        raise UnknownEntryError("file", file_id)
    return found


@ROUTES.route("GET", _ONE, "Describe a file", parameters=(_ID,), reply=FileObject, errors=STORE_ERRORS)
async def get_file(request: web.Request) -> web.Response:
    return json_reply(file_object(await file_of(request, request.match_info["file_id"])))


@ROUTES.route(
    "GET",
    f"{_ONE}/content",
    "Return the content of a file",
    parameters=(_ID,),
    replies=(("application/octet-stream", bytes),),
    errors=STORE_ERRORS,
)
async def get_content(request: web.Request) -> web.StreamResponse:
    path = await request.app[BULK].path_of(await file_of(request, request.match_info["file_id"]))
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})


@ROUTES.route(
    "DELETE",
    _ONE,
    "Delete a file; a batch that has not ended and needs it drops the requests that are not answered",
    parameters=(_ID,),
    reply=DeletedFile,
    errors=STORE_ERRORS,
)
async def delete_file(request: web.Request) -> web.Response:
    file_id = request.match_info["file_id"]
    if not await request.app[BULK].delete_file(owner_of(request), file_id):
        raise UnknownEntryError("file", file_id)
    return json_reply(DeletedFile(file_id))
