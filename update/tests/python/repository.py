"""A repository that python-tuf makes, served over HTTP, with whatever faults a case wants.

Everything is in memory. A request is recorded; what a case put into `faults` is served in place of
the real file.
"""

import datetime
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import (
    DelegatedRole,
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    SuccinctRoles,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization.json import JSONSerializer

TOP = ("root", "timestamp", "snapshot", "targets")


def days(count):
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    return now + datetime.timedelta(days=count)


def signer(kind="ed25519"):
    make = {
        "ed25519": CryptoSigner.generate_ed25519,
        "ecdsa": CryptoSigner.generate_ecdsa,
        "rsa": CryptoSigner.generate_rsa,
        "rsa-pkcs1v15": lambda: CryptoSigner.generate_rsa(scheme="rsa-pkcs1v15-sha256"),
    }
    return make[kind]()


class Repository:
    """Live documents in `docs`, published bytes by role and version in `published`."""

    def __init__(self, kind="ed25519"):
        self.docs = {
            "root": Metadata(Root(expires=days(30))),
            "timestamp": Metadata(Timestamp(expires=days(30))),
            "snapshot": Metadata(Snapshot(expires=days(30))),
            "targets": Metadata(Targets(expires=days(30))),
        }
        self.signers = {}
        self.published = {}
        self.content = {}
        self.faults = {}
        self.requests = []
        self.describe_files = False
        self.algorithms = ["sha256"]
        for role in TOP:
            self.add_key(role, signer(kind))
        self.publish("targets", "snapshot", "timestamp", "root")

    @property
    def root(self):
        return self.docs["root"].signed

    @property
    def timestamp(self):
        return self.docs["timestamp"].signed

    @property
    def snapshot(self):
        return self.docs["snapshot"].signed

    def role(self, name):
        return self.docs[name].signed

    def add_key(self, role, key):
        self.root.add_key(key.public_key, role)
        self.signers.setdefault(role, []).append(key)

    def set_keys(self, role, named, threshold, signing):
        """Names keys for a top-level role, and says who signs, whether they may or not."""
        self.root.roles[role].keyids.clear()
        for key in named:
            self.root.add_key(key.public_key, role)
        self.root.roles[role].threshold = threshold
        self.signers[role] = list(signing)

    def rotate(self, role):
        key = signer()
        self.set_keys(role, [key], 1, [key])

    def publish(self, *roles):
        for role in roles:
            doc = self.docs[role]
            versions = self.published.setdefault(role, {})
            if versions:
                doc.signed.version += 1
            self.put(role)

    def put(self, role):
        """Signs and publishes without counting up."""
        doc = self.docs[role]
        doc.signatures.clear()
        for key in self.signers[role]:
            doc.sign(key, append=True)
        data = doc.to_bytes(JSONSerializer())
        versions = self.published.setdefault(role, {})
        versions[doc.signed.version] = data
        versions["newest"] = data
        listed = MetaFile(doc.signed.version)
        if self.describe_files:
            listed = MetaFile.from_data(doc.signed.version, data, ["sha256", "sha512"])
        if role == "snapshot":
            self.timestamp.snapshot_meta = listed
        elif role not in TOP or role == "targets":
            self.snapshot.meta[f"{role}.json"] = listed

    def release(self, *roles):
        self.publish(*roles, "snapshot", "timestamp")

    def delegate(self, delegator, name, paths=("*",), terminating=False, **more):
        """Adds a delegation last; the role gets a key and an empty document if it has none."""
        owner = self.role(delegator)
        if owner.delegations is None:
            owner.delegations = Delegations({}, roles={})
        prefixes = more.get("prefixes")
        paths = None if prefixes else list(paths)
        role = DelegatedRole(name, [], 1, terminating, paths, prefixes)
        owner.delegations.roles[name] = role
        key = more.get("key") or signer()
        owner.add_key(key.public_key, name)
        self.signers.setdefault(name, []).append(key)
        if name not in self.docs:
            self.docs[name] = Metadata(Targets(expires=more.get("expires") or days(30)))
        return key

    def delegate_bins(self, bits, prefix):
        key = signer()
        owner = self.role("targets")
        bins = SuccinctRoles([], 1, bits, prefix)
        owner.delegations = Delegations({}, succinct_roles=bins)
        owner.add_key(key.public_key)
        for name in bins.get_roles():
            self.docs[name] = Metadata(Targets(expires=days(30)))
            self.signers[name] = [key]
        return list(bins.get_roles())

    def add_target(self, role, path, data):
        target = TargetFile.from_data(path, data, self.algorithms)
        self.role(role).targets[path] = target
        for digest in target.hashes.values():
            folder, slash, name = path.rpartition("/")
            self.content[f"{folder}{slash}{digest}.{name}"] = data
        self.content[path] = data

    def answer(self, path):
        """Bytes for a path below the repository's URL, or None."""
        self.requests.append(path)
        if path in self.faults:
            return self.faults[path]
        kind, _, rest = path.partition("/")
        if kind == "targets":
            return self.content.get(unquote(rest))
        name = rest.removesuffix(".json")
        if name == "timestamp":
            return self.published["timestamp"]["newest"]
        version, _, role = name.partition(".")
        if self.root.consistent_snapshot or role == "root":
            return self.published.get(unquote(role), {}).get(int(version))
        return self.published.get(unquote(name), {}).get("newest")

    def metadata_requests(self):
        return [path.removeprefix("metadata/") for path in self.requests if "metadata/" in path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name, _, path = self.path.lstrip("/").partition("/")
        answer = self.server.repositories[name].answer(path)
        if callable(answer):
            self.close_connection = True
            answer(self)
            return
        if answer is None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, tls=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = {}
        self.base = f"http://127.0.0.1:{self.server_address[1]}"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
            self.base = f"https://localhost:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def add(self, name, repository):
        self.repositories[name] = repository
        return f"{self.base}/{name}"

    def handle_error(self, *_):
        """A client that gives up is part of some cases."""
