"""`memgw.wsgi:app`, the WSGI application, for gunicorn."""

import os
import sys

from memgw.app import create_app
from memgw.config import Config, ConfigError, environment

try:
    app = create_app(Config.load(environment(os.environ)), os.environ)
except ConfigError as exc:
    sys.exit("\n".join(f"memgw: {line}" for line in exc.lines))
