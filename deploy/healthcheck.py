"""Ends with 0 if the server in this container is alive. For images, which have no curl."""

import http.client
import os
import ssl
import sys

port = int(os.environ.get("SBERT_SERVE_PORT", "8080"))
try:
    if os.environ.get("SBERT_SERVE_TLS_CERT"):
        unchecked = ssl.create_default_context()  # it asks itself, and by no name of the certificate
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        server = http.client.HTTPSConnection("127.0.0.1", port, timeout=4, context=unchecked)
    else:
        server = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    server.request("GET", "/health/live")
    status = server.getresponse().status
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"port {port} does not respond: {error}")
if status != http.HTTPStatus.OK:
    sys.exit(f"port {port} responds with {status}")
