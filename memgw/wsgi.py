"""`memgw.wsgi:app`, the WSGI application, for gunicorn."""

import os

from memgw.app import create_app
from memgw.config import load_or_exit

app = create_app(load_or_exit(os.environ), os.environ)
