"""Where the server is, unless a command says otherwise; apart from the client so that `--help` need not load HTTP."""

DEFAULT_URL = "http://127.0.0.1:8090"
URL_VARIABLE = "WEIGHBRIDGE_URL"
TOKEN_VARIABLE = "WEIGHBRIDGE_TOKEN"
PROJECT_VARIABLE = "WEIGHBRIDGE_PROJECT"
