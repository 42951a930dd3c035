"""Reads a repository's folder with python-tuf's own client.

`ngclient.py FOLDER TARGET…` refreshes from the first root and prints each target's SHA-256.
"""

import functools
import hashlib
import http.server
import sys
import tempfile
import threading

from tuf.ngclient import Updater


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def main(folder, names):
    serve = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with open(f"{folder}/metadata/1.root.json", "rb") as file:
        root = file.read()
    with tempfile.TemporaryDirectory() as store:
        updater = Updater(
            store, f"{url}/metadata/", target_dir=store, target_base_url=f"{url}/targets/",
            bootstrap=root)
        updater.refresh()
        for name in names:
            info = updater.get_targetinfo(name)
            if info is None:
                print(f"{name} missing")
                continue
            with open(updater.download_target(info), "rb") as file:
                print(name, hashlib.sha256(file.read()).hexdigest())


main(sys.argv[1], sys.argv[2:])
