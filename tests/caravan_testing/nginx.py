"""A configuration of nginx that leaves nothing outside a folder."""

from pathlib import Path

_CONFIGURATION = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {http}
}}
"""


def configuration(folder: Path, http: str) -> str:
    """Return a configuration whose files are in ``folder``, with ``http`` in its block of that name."""
    return _CONFIGURATION.format(folder=folder, http=http)
