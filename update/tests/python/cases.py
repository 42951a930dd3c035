"""What a TUF client has to do with repositories that python-tuf made, one function for each promise.

Run as `cases.py CLIENT [NAME]`: CLIENT speaks the command line protocol of the TUF conformance suite.
Prints a line for each case and exits with 1 if one failed.
"""

import concurrent.futures
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import traceback

from repository import TOP, Repository, Server, days, signer
from tuf.api.metadata import Metadata

SERVER = Server()


class Client:
    """The client under test, with folders and a repository of its own."""

    def __init__(self, command, name, repository=None):
        self.command = command
        self.repository = repository or Repository()
        self.url = SERVER.add(name, self.repository)
        self.folder = tempfile.mkdtemp(prefix="tuf-")
        self.metadata = os.path.join(self.folder, "metadata")
        self.targets = os.path.join(self.folder, "targets")
        os.mkdir(self.metadata)
        os.mkdir(self.targets)
        self.init(self.repository.published["root"][1])

    def init(self, root):
        path = os.path.join(self.folder, "initial.json")
        with open(path, "wb") as file:
            file.write(root)
        assert self.run("init", path) == 0

    def run(self, *arguments, later=0):
        prefix = ["faketime", "-f", f"+{later}d"] if later else []
        command = [*prefix, self.command, "--metadata-dir", self.metadata, *arguments]
        done = subprocess.run(command, capture_output=True, timeout=60)
        self.message = done.stderr.decode()
        return done.returncode

    def refresh(self, later=0):
        return self.run("--metadata-url", f"{self.url}/metadata/", "refresh", later=later)

    def download(self, name, later=0):
        return self.run(
            "--metadata-url", f"{self.url}/metadata/",
            "--target-name", name,
            "--target-base-url", f"{self.url}/targets/",
            "--target-dir", self.targets,
            "download",
            later=later,
        )

    def trusted(self):
        """Versions by file name without `.json`."""
        names = sorted(name for name in os.listdir(self.metadata) if name.endswith(".json"))
        load = lambda name: Metadata.from_file(os.path.join(self.metadata, name)).signed.version
        return {name.removesuffix(".json"): load(name) for name in names}

    def bytes_of(self, role):
        with open(os.path.join(self.metadata, f"{role}.json"), "rb") as file:
            return file.read()

    def downloaded(self):
        found = []
        for folder, _, names in os.walk(self.targets):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    found.append(file.read())
        return sorted(found)

    def close(self):
        shutil.rmtree(self.folder)


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def each(**variants):
    """Makes one case of each variant."""

    def wrap(function):
        for name, value in variants.items():
            made = lambda client, value=value: function(client, value)
            CASES[f"{function.__name__}[{name}]"] = made
        return function

    return wrap


@case
def refresh_asks_for_what_it_needs_in_order(client):
    c = client()
    assert c.refresh() == 0
    asked = ["2.root.json", "timestamp.json", "1.snapshot.json", "1.targets.json"]
    assert c.repository.metadata_requests() == asked
    assert c.trusted() == dict.fromkeys(TOP, 1)
    c.repository.requests.clear()
    assert c.refresh() == 0
    assert c.repository.metadata_requests() == ["2.root.json", "timestamp.json"]


@case
def metadata_is_kept_byte_for_byte(client):
    c = client()
    c.repository.published["targets"][1] += b"\n\n"
    assert c.refresh() == 0
    for role in TOP:
        assert c.bytes_of(role) == c.repository.published[role][1], role


@case
def unknown_target_is_a_failure_after_the_refresh(client):
    c = client()
    assert c.download("nothing") == 1
    assert c.trusted() == dict.fromkeys(TOP, 1)


@each(no_version=lambda r: r["signed"].pop("version"),
      other_signature=lambda r: r["signatures"][0].update(sig="00" * 64),
      no_signature=lambda r: r["signatures"].clear(),
      wrong_type=lambda r: r["signed"].update(_type="targets"),
      float_version=lambda r: r["signed"].update(version=1.0))
def bad_initial_root_stops_before_any_request(client, damage):
    c = client()
    root = json.loads(c.repository.published["root"][1])
    damage(root)
    c.init(json.dumps(root).encode())
    assert c.refresh() == 1
    assert c.repository.requests == []


@case
def fields_unknown_to_the_specification_are_signed_and_kept(client):
    c = client()
    repo = c.repository
    repo.root.unrecognized_fields["x-more"] = {"ü\n\"\\": [1, None, True]}
    keyid = repo.root.roles["root"].keyids[0]
    repo.root.keys[keyid].unrecognized_fields["x-owner"] = "@somebody"
    repo.root.roles["root"].unrecognized_fields["x-expiry"] = 365
    repo.publish("root")
    assert c.refresh() == 0, c.message
    assert c.bytes_of("root") == repo.published["root"][2]


@case
def timestamp_of_the_same_version_is_passed_over(client):
    c = client()
    assert c.refresh() == 0
    before = c.bytes_of("timestamp")
    c.repository.timestamp.snapshot_meta.version = 100
    c.repository.put("timestamp")
    assert c.refresh() == 0
    assert c.bytes_of("timestamp") == before


@case
def timestamp_does_not_go_back(client):
    c = client()
    c.repository.publish("timestamp")
    assert c.refresh() == 0
    c.repository.timestamp.version = 1
    c.repository.put("timestamp")
    assert c.refresh() == 1
    assert c.trusted()["timestamp"] == 2


@each(plain=False, described=True)
def snapshot_does_not_go_back(client, describe):
    c = client()
    c.repository.describe_files = describe
    c.repository.release()
    assert c.refresh() == 0
    c.repository.snapshot.version = 1
    c.repository.put("snapshot")
    c.repository.publish("timestamp")
    assert c.refresh() == 1
    assert (c.trusted()["timestamp"], c.trusted()["snapshot"]) == (2, 2)
    assert c.repository.requests[-1] == "metadata/timestamp.json"


@each(plain=False, described=True)
def targets_do_not_go_back(client, describe):
    c = client()
    c.repository.describe_files = describe
    c.repository.release("targets")
    assert c.refresh() == 0
    c.repository.role("targets").version = 1
    c.repository.put("targets")
    c.repository.publish("snapshot", "timestamp")
    assert c.refresh() == 1
    assert (c.trusted()["snapshot"], c.trusted()["targets"]) == (2, 2)


@case
def roles_do_not_vanish_from_the_snapshot(client):
    c = client()
    c.repository.delegate("targets", "gone")
    c.repository.release("gone", "targets")
    assert c.refresh() == 0
    del c.repository.snapshot.meta["gone.json"]
    c.repository.publish("snapshot", "timestamp")
    assert c.refresh() == 1
    assert c.trusted()["snapshot"] == 2


@case
def snapshot_of_another_version_than_listed_is_refused(client):
    c = client()
    c.repository.publish("snapshot", "timestamp")
    c.repository.published["snapshot"][2] = c.repository.published["snapshot"][1]
    assert c.refresh() == 1
    assert c.trusted() == {"root": 1, "timestamp": 2}


@case
def targets_of_another_version_than_listed_are_refused(client):
    c = client()
    assert c.refresh() == 0
    c.repository.release("targets")
    c.repository.published["targets"][2] = c.repository.published["targets"][1]
    assert c.refresh() == 1
    assert c.trusted()["targets"] == 1


@each(snapshot="snapshot", targets="targets")
def other_bytes_than_described_are_refused(client, role):
    c = client()
    c.repository.describe_files = True
    c.repository.release("targets")
    c.repository.published[role][2] += b" "
    assert c.refresh() == 1
    assert role not in c.trusted()


@each(root=("root", {}), timestamp=("timestamp", {"root": 2}),
      snapshot=("snapshot", {"root": 2, "timestamp": 2}),
      targets=("targets", {"root": 2, "timestamp": 2, "snapshot": 2}))
def unsigned_metadata_ends_the_refresh_there(client, expected):
    role, trusted = expected
    c = client()
    c.repository.signers[role] = []
    c.repository.publish("root", "targets", "snapshot", "timestamp")
    assert c.refresh() == 1
    assert c.trusted() == (trusted or {"root": 1})


@each(timestamp=("timestamp", 1), snapshot=("snapshot", 2), targets=("targets", 2))
def missing_metadata_ends_the_refresh_there(client, missing):
    role, version = missing
    c = client()
    assert c.refresh() == 0
    c.repository.release("targets")
    c.repository.published[role] = {"newest": None}
    assert c.refresh() == 1
    name = "timestamp.json" if role == "timestamp" else f"{version}.{role}.json"
    assert c.repository.metadata_requests()[-1] == name
    assert c.trusted()[role] == 1


@case
def snapshot_that_looks_like_a_timestamp_is_none(client):
    c = client()
    repo = c.repository
    repo.add_key("snapshot", repo.signers["timestamp"][0])
    repo.publish("root")
    repo.snapshot.meta = {"snapshot.json": repo.timestamp.snapshot_meta}
    repo.publish("snapshot")
    repo.published["timestamp"]["newest"] = repo.published["snapshot"][2]
    assert c.refresh() == 1
    assert c.trusted() == {"root": 2}


@each(ed25519="ed25519", ecdsa="ecdsa", rsa="rsa")
def wrong_signature_of_each_kind(client, kind):
    c = client()
    repo = c.repository
    key = signer(kind)
    repo.add_key("root", key)
    repo.root.roles["root"].threshold = 2
    repo.publish("root")
    assert c.refresh() == 0, c.message
    repo.publish("root")
    root = json.loads(repo.published["root"][3])
    for one in root["signatures"]:
        if one["keyid"] == key.public_key.keyid:
            one["sig"] = json.loads(repo.published["root"][2])["signatures"][1]["sig"]
    repo.published["root"][3] = json.dumps(root).encode()
    assert c.refresh() == 1
    assert c.trusted()["root"] == 2


@each(hash={"sha256": "00" * 32}, length=7)
def a_good_file_that_is_described_wrongly_is_refused(client, wrong):
    c = client()
    c.repository.describe_files = True
    c.repository.publish("targets")
    listed = c.repository.snapshot.meta["targets.json"]
    if isinstance(wrong, dict):
        listed.hashes = wrong
    else:
        listed.length -= wrong
    c.repository.publish("snapshot", "timestamp")
    assert c.refresh() == 1
    assert c.trusted() == {"root": 1, "timestamp": 2, "snapshot": 2}


@case
def expired_root_is_taken_and_nothing_after_it(client):
    c = client()
    assert c.refresh() == 0
    c.repository.root.expires = days(-1)
    c.repository.publish("root")
    c.repository.release("targets")
    assert c.refresh() == 1
    assert c.trusted() == {"root": 2, "timestamp": 1, "snapshot": 1, "targets": 1}


@case
def expired_root_in_the_middle_of_the_chain_does_not_matter(client):
    c = client()
    c.repository.root.expires = days(-1)
    c.repository.publish("root")
    c.repository.root.expires = days(30)
    c.repository.publish("root")
    assert c.refresh() == 0
    assert c.trusted()["root"] == 3


@each(timestamp="timestamp", snapshot="snapshot", targets="targets")
def expired_metadata_is_not_taken(client, role):
    c = client()
    assert c.refresh() == 0
    c.repository.role(role).expires = days(-5)
    c.repository.publish(role)
    if role == "targets":
        c.repository.publish("snapshot")
    if role != "timestamp":
        c.repository.publish("timestamp")
    assert c.refresh() == 1
    assert c.trusted()[role] == 1


@case
def expired_stored_metadata_still_leads_to_newer(client):
    c = client()
    c.repository.timestamp.expires = days(7)
    c.repository.publish("timestamp")
    assert c.refresh() == 0
    c.repository.timestamp.expires = days(21)
    c.repository.release("targets")
    assert c.refresh(later=18) == 0
    assert (c.trusted()["timestamp"], c.trusted()["targets"]) == (3, 2)


@case
def expired_stored_metadata_is_not_used(client):
    c = client()
    c.repository.timestamp.expires = days(7)
    c.repository.publish("timestamp")
    assert c.refresh() == 0
    assert c.refresh(later=18) == 1


@each(timestamp=("timestamp",), snapshot=("snapshot", "timestamp"))
def fast_forward_is_undone_by_new_keys(client, rotated):
    c = client()
    role = rotated[0]
    c.repository.role(role).version = 99999
    c.repository.put(role)
    if role == "snapshot":
        c.repository.publish("timestamp")
    assert c.refresh() == 0
    assert c.trusted()[role] == 99999
    for name in rotated:
        c.repository.rotate(name)
    c.repository.publish("root")
    c.repository.role(role).version = 1
    c.repository.put(role)
    if role == "snapshot":
        c.repository.publish("timestamp")
    assert c.refresh() == 0, c.message
    assert c.trusted()[role] == 1


@case
def fast_forward_of_targets_is_undone_by_a_new_snapshot_key(client):
    c = client()
    for _ in range(99):
        c.repository.publish("targets")
    c.repository.release()
    assert c.refresh() == 0
    assert c.trusted()["targets"] == 100
    c.repository.rotate("snapshot")
    c.repository.publish("root")
    c.repository.role("targets").version = 1
    c.repository.release("targets")
    assert c.refresh() == 0, c.message
    assert c.trusted()["targets"] == 2


@case
def an_added_key_does_not_forget_versions(client):
    c = client()
    c.repository.publish("timestamp")
    assert c.refresh() == 0
    c.repository.add_key("timestamp", signer())
    c.repository.publish("root")
    c.repository.timestamp.version = 1
    c.repository.put("timestamp")
    assert c.refresh() == 1


# Versions of root, each: named keys, threshold, signing keys. The last one is refused if False.
@each(
    one_key=([([1], 1, [1]), ([2], 1, [2, 1]), ([2], 1, [2])], True),
    foreign_signatures=([([1], 1, [3, 1, 4]), ([2], 1, [3, 2, 1, 4]), ([2], 1, [3, 2, 4])], True),
    three_of_five=([([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([0, 1, 2, 3, 4], 3, [0, 4, 1])], True),
    one_of_five_changes=([([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([0, 1, 3, 4, 5], 3, [0, 4, 1])], True),
    all_change=([([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([5, 6, 7, 8, 9], 3, [0, 2, 4, 5, 6, 7]),
                 ([5, 6, 7, 8, 9], 3, [5, 6, 7])], True),
    threshold_rises=([([1, 2, 3], 1, [1]), ([1, 2, 3], 2, [1, 2])], True),
    threshold_falls=([([1, 2, 3], 2, [1, 2]), ([1, 2, 3], 1, [1, 2]), ([1, 2, 3], 1, [1])], True),
    not_by_the_old_key=([([1], 1, [1]), ([2], 1, [2, 3, 4])], False),
    not_by_the_new_key=([([1], 1, [1]), ([2], 1, [1, 3, 4])], False),
    not_by_three_new=([([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([0, 1, 3, 4, 5], 3, [0, 2, 4])], False),
    not_by_three_old=([([0, 1, 2, 3, 4], 3, [0, 2, 4]), ([0, 1, 3, 4, 5], 3, [0, 4, 5])], False),
    new_threshold_missed=([([1, 2, 3], 1, [1]), ([1, 2, 3], 2, [2])], False),
    old_threshold_missed=([([1, 2, 3], 2, [1, 2]), ([1, 2, 3], 1, [1])], False),
)
def root_rotation(client, chain):
    versions, taken = chain
    repo = Repository()
    keys = [signer() for _ in range(10)]
    repo.published["root"] = {}
    repo.root.version = 0
    for named, threshold, signing in versions:
        repo.root.version += 1
        repo.set_keys("root", [keys[i] for i in named], threshold, [keys[i] for i in signing])
        repo.put("root")
    c = client(repo)
    assert c.refresh() == (0 if taken else 1), c.message
    last = len(versions) if taken else len(versions) - 1
    assert c.bytes_of("root") == repo.published["root"][last]


@each(
    one_key=([2], 1, [2], True),
    foreign_signatures=([1], 1, [3, 1, 4], True),
    three_of_five=([0, 1, 2, 3, 4], 3, [2, 3, 4], True),
    not_by_the_new_key=([2], 1, [1, 3, 4], False),
    wrong_third=([0, 1, 3, 4, 5], 3, [0, 2, 4], False),
    third_missing=([0, 1, 3, 4, 5], 3, [0, 4], False),
)
def rotation_of_other_roles(client, rotation):
    named, threshold, signing, taken = rotation
    for role in ("timestamp", "snapshot", "targets"):
        keys = [signer() for _ in range(6)]
        c = client()
        repo = c.repository
        repo.set_keys(role, [keys[i] for i in named], threshold, [keys[i] for i in signing])
        repo.publish("root")
        repo.release("targets")
        assert c.refresh() == (0 if taken else 1), (role, c.message)
        if taken:
            assert c.bytes_of(role) == repo.published[role][2]


@case
def root_versions_are_not_skipped(client):
    c = client()
    c.repository.publish("root", "root")
    c.repository.published["root"][2] = c.repository.published["root"][3]
    assert c.refresh() == 1
    assert c.trusted() == {"root": 1}


@each(ed25519="ed25519", ecdsa="ecdsa", rsa="rsa", rsa_pkcs1v15="rsa-pkcs1v15")
def key_kinds(client, kind):
    c = client(Repository(kind))
    assert c.refresh() == 0, c.message


@case
def keytype_may_be_the_name_of_the_scheme(client):
    repo = Repository("ecdsa")
    for key in repo.root.keys.values():
        key.keytype = "ecdsa-sha2-nistp256"
    repo.published["root"] = {}
    repo.put("root")
    c = client(repo)
    assert c.refresh() == 0, c.message


@case
def key_of_an_unknown_kind_does_not_disturb(client):
    c = client()
    repo = c.repository
    repo.add_key("targets", signer())
    odd = repo.root.keys[repo.root.roles["targets"].keyids[0]]
    odd.keytype, odd.scheme, odd.keyval = "lattice", "lattice", {"other": [1]}
    repo.publish("root")
    repo.release("targets")
    assert c.refresh() == 0, c.message


@case
def keyid_without_a_key_counts_nothing(client):
    c = client()
    repo = c.repository
    repo.root.roles["snapshot"].keyids.append(signer().public_key.keyid)
    repo.root.roles["snapshot"].threshold = 2
    repo.publish("root")
    repo.release()
    assert c.refresh() == 1
    assert c.trusted() == {"root": 2, "timestamp": 2}


@case
def one_key_under_many_ids_counts_once(client):
    c = client()
    repo = c.repository
    document = json.loads(repo.published["root"][1])["signed"]
    document["version"] = 2
    real = document["roles"]["snapshot"]["keyids"][0]
    again = "ab" * 32
    document["keys"][again] = dict(document["keys"][real], **{"x-copy": 1})
    document["roles"]["snapshot"] = {"keyids": [real, again], "threshold": 2}
    root = Metadata.from_dict({"signatures": [], "signed": document})
    root.sign(repo.signers["root"][0])
    repo.published["root"][2] = root.to_bytes()
    repo.release()
    snapshot = json.loads(repo.published["snapshot"][2])
    twin = dict(snapshot["signatures"][0], keyid=again)
    snapshot["signatures"].append(twin)
    repo.published["snapshot"][2] = json.dumps(snapshot).encode()
    assert c.refresh() == 1
    assert c.trusted() == {"root": 2, "timestamp": 2}


@case
def one_id_signing_twice_is_refused(client):
    c = client()
    repo = c.repository
    repo.release()
    snapshot = json.loads(repo.published["snapshot"][2])
    snapshot["signatures"] *= 2
    repo.published["snapshot"][2] = json.dumps(snapshot).encode()
    assert c.refresh() == 1


@case
def names_of_hash_functions_in_keys_do_not_matter(client):
    c = client()
    keyid = c.repository.root.roles["snapshot"].keyids[0]
    c.repository.root.keys[keyid].unrecognized_fields["keyid_hash_algorithms"] = ["md5"]
    c.repository.publish("root")
    c.repository.release()
    assert c.refresh() == 0, c.message


@each(sha256=["sha256"], sha512=["sha512"], both=["sha256", "sha512"])
def target_is_downloaded_once(client, algorithms):
    c = client()
    c.repository.algorithms = algorithms
    c.repository.add_target("targets", "path/to/a file.txt", b"content")
    c.repository.release("targets")
    assert c.download("path/to/a file.txt") == 0, c.message
    assert c.downloaded() == [b"content"]
    count = len([r for r in c.repository.requests if r.startswith("targets/")])
    assert c.download("path/to/a file.txt") == 0
    assert len([r for r in c.repository.requests if r.startswith("targets/")]) == count == 1


@case
def target_with_an_unknown_digest_alone_is_refused(client):
    c = client()
    c.repository.add_target("targets", "odd", b"content")
    c.repository.add_target("targets", "good", b"content")
    hashes = c.repository.role("targets").targets["odd"].hashes
    hashes["unknown"] = hashes.pop("sha256")
    c.repository.release("targets")
    assert c.download("odd") == 1
    assert c.downloaded() == []
    assert c.download("good") == 0, c.message


@case
def substituted_target_is_refused(client):
    c = client()
    c.repository.add_target("targets", "one", b"content of one")
    c.repository.add_target("targets", "two", b"content of two")
    c.repository.release("targets")
    assert c.download("one") == 0
    for path in c.repository.content:
        c.repository.content[path] = b"other, and longer than that was"
    assert c.download("two") == 1
    for path in c.repository.content:
        c.repository.content[path] = b"CONTENT OF TWO"
    assert c.download("two") == 1
    assert c.downloaded() == [b"content of one"]


@case
def changed_target_replaces_the_old_file(client):
    c = client()
    for number in range(3):
        c.repository.add_target("targets", "file", f"content {number}".encode())
        c.repository.release("targets")
        assert c.download("file") == 0, c.message
        assert c.downloaded() == [f"content {number}".encode()]


@case
def repository_without_consistent_snapshots(client):
    repo = Repository()
    repo.root.consistent_snapshot = False
    repo.published["root"] = {}
    repo.put("root")
    repo.add_target("targets", "a/b", b"content")
    repo.delegate("targets", "role")
    repo.release("role", "targets")
    c = client(repo)
    assert c.download("a/b") == 0, c.message
    asked = ["2.root.json", "timestamp.json", "snapshot.json", "targets.json"]
    assert repo.metadata_requests() == asked
    assert repo.requests[-1] == "targets/a/b"


GRAPHS = {
    "one": ("targets>A", "A"),
    "two": ("targets>A targets>B", "A B"),
    "depth_first": ("targets>A targets>B A>C A>D", "A C D B"),
    "deeper_first": ("targets>A targets>B A>C C>D", "A C D B"),
    "terminating": ("targets>A targets>B A>C! A>D", "A C"),
    "terminating_goes_down": ("targets>A targets>B A>C! C>D", "A C D"),
    "earlier_siblings_come_first": ("targets>A targets>B A>C A>D! A>E", "A C D"),
    "other_paths": ("targets>A:*.py targets>B A>C", "B"),
    "other_paths_below": ("targets>A targets>B A>C:*.py C>D", "A B"),
    "terminating_elsewhere": ("targets>A:*.py! targets>B", "B"),
    "cycle": ("targets>A targets>B B>C C>D D>B", "A B C D"),
    "to_itself": ("targets>A A>A targets>B", "A B"),
    "two_ways": ("targets>A targets>B B>C A>C", "A C B"),
    "one_of_two_ways": ("targets>A targets>B B>C A>C:*.py", "A B C"),
}


@each(**GRAPHS)
def search_order(client, graph):
    edges, order = graph
    c = client()
    keys = {}
    for edge in edges.split():
        terminating = edge.endswith("!")
        ends, _, pattern = edge.removesuffix("!").partition(":")
        owner, _, name = ends.partition(">")
        key = c.repository.delegate(
            owner, name, [pattern or "*"], terminating, key=keys.get(name))
        keys[name] = key
    c.repository.release(*sorted(keys), "targets")
    assert c.download("missing") == 1
    assert c.repository.metadata_requests()[4:] == [f"1.{name}.json" for name in order.split()]


@each(own=("file", True, ""), wildcard=("README.md", True, "A"),
      folder=("releases/x/x_v1", True, "B C"), suffix=("releases/y/y_v1.zip", True, "B D"),
      not_by_the_whole_chain=("releases/z/z_v1.zip", False, "B"))
def search_by_path(client, wanted):
    path, found, order = wanted
    c = client()
    repo = c.repository
    repo.delegate("targets", "A", ["*.doc", "*.md"])
    repo.delegate("targets", "B", ["releases/*/*"])
    repo.delegate("B", "C", ["releases/x/*"])
    repo.delegate("B", "D", ["releases/y/*.zip"])
    for role, name in (("targets", "file"), ("A", "README.md"), ("C", "releases/x/x_v1"),
                       ("D", "releases/y/y_v1.zip"), ("D", "releases/z/z_v1.zip")):
        repo.add_target(role, name, name.encode())
    repo.release("A", "B", "C", "D", "targets")
    assert c.download(path) == (0 if found else 1), c.message
    assert c.downloaded() == ([path.encode()] if found else [])
    assert repo.metadata_requests()[4:] == [f"1.{name}.json" for name in order.split()]


@case
def search_by_hash_prefix(client):
    import hashlib
    c = client()
    repo = c.repository
    first = hashlib.sha256(b"file").hexdigest()[0]
    others = [digit for digit in "0123456789abcdef" if digit != first]
    repo.delegate("targets", "others", prefixes=others)
    repo.delegate("targets", "mine", prefixes=[first])
    repo.add_target("mine", "file", b"content")
    repo.release("others", "mine", "targets")
    assert c.download("file") == 0, c.message
    assert repo.metadata_requests()[4:] == ["1.mine.json"]


@each(one_bit=1, three_bits=3, eight_bits=8)
def search_by_succinct_bins(client, bits):
    c = client()
    repo = c.repository
    bins = repo.delegate_bins(bits, "bin")
    owner = repo.role("targets").delegations.succinct_roles
    for name in ("a", "b/c", "d.tar.gz"):
        repo.add_target(owner.get_role_for_target(name), name, name.encode())
    repo.release(*bins, "targets")
    for name in ("a", "b/c", "d.tar.gz"):
        assert c.download(name) == 0, c.message


@each(question="?", hash="#", slash="/role", up="../role", percent="%2e%2e%2frole", dot=".",
      space="a b", other="röle")
def unusual_role_names(client, name):
    from urllib.parse import quote
    c = client()
    c.repository.delegate("targets", name)
    c.repository.release(name, "targets")
    assert c.download("missing") == 1
    assert f"1.{quote(name, '')}.json" in c.repository.metadata_requests()
    assert len(c.trusted()) == 5
    assert sorted(os.listdir(c.folder)) == ["initial.json", "metadata", "targets"]


@each(root="root", targets="targets", timestamp="timestamp", snapshot="snapshot")
def delegated_role_does_not_take_the_name_of_a_top_level_one(client, name):
    c = client()
    c.repository.delegate("targets", "role")
    c.repository.release("role", "targets")
    document = json.loads(c.repository.published["targets"][2])["signed"]
    document["version"] = 3
    document["delegations"]["roles"][0]["name"] = name
    made = {"signed": document, "signatures": []}
    from securesystemslib.formats import encode_canonical
    key = c.repository.signers["targets"][0]
    made["signatures"].append(key.sign(encode_canonical(document).encode()).to_dict())
    c.repository.role("targets").version = 3
    c.repository.put("targets")
    c.repository.release()
    c.repository.published["targets"][3] = json.dumps(made).encode()
    assert c.refresh() == 1
    assert "targets" not in c.trusted()


@case
def cached_role_is_verified_with_the_keys_of_this_way(client):
    c = client()
    repo = c.repository
    repo.delegate("targets", "A", ["a/*"])
    repo.delegate("targets", "B", ["b/*"])
    repo.delegate("A", "C", ["*/*"])
    own = repo.signers["C"][:]
    repo.delegate("B", "C", ["*/*"])
    repo.signers["C"] = own
    repo.add_target("C", "a/file", b"for a")
    repo.add_target("C", "b/file", b"for b")
    repo.release("C", "A", "B", "targets")
    assert c.download("a/file") == 0, c.message
    assert c.download("b/file") == 1
    assert c.downloaded() == [b"for a"]


@case
def delegated_role_that_the_snapshot_does_not_list(client):
    c = client()
    c.repository.delegate("targets", "role")
    c.repository.add_target("role", "file", b"content")
    c.repository.publish("role")
    del c.repository.snapshot.meta["role.json"]
    c.repository.release("targets")
    assert c.refresh() == 0
    assert c.download("file") == 1
    assert c.downloaded() == []


@case
def delegated_role_with_a_foreign_signature(client):
    c = client()
    c.repository.delegate("targets", "role")
    c.repository.delegate("targets", "later")
    c.repository.signers["role"] = [signer()]
    c.repository.add_target("later", "file", b"content")
    c.repository.release("role", "later", "targets")
    assert c.download("file") == 1
    assert c.downloaded() == []
    assert "role" not in c.trusted()


@case
def expired_delegated_role(client):
    c = client()
    c.repository.delegate("targets", "role", expires=days(-1))
    c.repository.add_target("role", "file", b"content")
    c.repository.release("role", "targets")
    assert c.refresh() == 0
    assert c.download("file") == 1
    assert c.downloaded() == []
    assert c.trusted() == {"root": 1, "snapshot": 2, "targets": 2, "timestamp": 2}


@each(stale=False, renewed=True)
def cached_delegated_role_expires(client, renewed):
    c = client()
    c.repository.delegate("targets", "role", expires=days(7))
    c.repository.add_target("role", "one", b"one")
    c.repository.add_target("role", "two", b"two")
    c.repository.release("role", "targets")
    assert c.download("one") == 0
    if renewed:
        c.repository.role("role").expires = days(21)
        c.repository.release("role")
    assert c.download("two", later=18) == (0 if renewed else 1)
    assert c.downloaded() == ([b"one", b"two"] if renewed else [b"one"])


@each(root="metadata/2.root.json", timestamp="metadata/timestamp.json",
      snapshot="metadata/1.snapshot.json", targets="metadata/1.targets.json")
def endless_metadata(client, path):
    c = client()

    def forever(handler):
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b" " * 65536)
        except OSError:
            pass

    c.repository.faults[path] = forever
    assert c.refresh() == 1
    assert "bytes" in c.message, c.message


@case
def endless_target(client):
    c = client()
    c.repository.add_target("targets", "file", b"content")
    c.repository.release("targets")
    for path in list(c.repository.content):
        c.repository.content[path] = b"content" * 1000
    assert c.download("file") == 1
    assert c.downloaded() == []


@case
def server_errors_are_not_an_end_of_the_chain(client):
    c = client()

    def broken(handler):
        handler.send_error(500)

    c.repository.faults["metadata/2.root.json"] = broken
    assert c.refresh() == 1
    assert "500" in c.message


@case
def target_is_resumed_where_it_broke_off(client):
    c = client()
    data = bytes(range(256)) * 4096
    c.repository.add_target("targets", "file", data)
    c.repository.release("targets")
    asked = []

    def half(handler):
        asked.append(handler.headers.get("Range"))
        if len(asked) == 1:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data[:500000])
            return
        start = int(asked[-1].removeprefix("bytes=").removesuffix("-"))
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        handler.wfile.write(data[start:])

    name = next(path for path in c.repository.content if path != "file")
    c.repository.faults[f"targets/{name}"] = half
    assert c.download("file") == 0, c.message
    assert c.downloaded() == [data]
    assert asked == [None, "bytes=500000-"], asked


@case
def damaged_store_heals(client):
    c = client()
    c.repository.add_target("targets", "file", b"content")
    c.repository.release("targets")
    assert c.refresh() == 0
    for role in ("timestamp", "snapshot", "targets"):
        with open(os.path.join(c.metadata, f"{role}.json"), "wb") as file:
            file.write(b"{ damaged")
    assert c.download("file") == 0, c.message


@case
def redirections_are_followed_to_their_end(client):
    c = client()

    def to(path):
        def redirect(handler):
            handler.send_response(302)
            handler.send_header("Location", path)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        return redirect

    prefix = "/" + c.url.rpartition("/")[2]
    c.repository.faults["metadata/timestamp.json"] = to(f"{prefix}/elsewhere")
    c.repository.faults["elsewhere"] = c.repository.published["timestamp"][1]
    assert c.refresh() == 0, c.message
    c.repository.faults["elsewhere"] = to(f"{prefix}/elsewhere")
    assert c.refresh() == 1
    assert "redirects" in c.message


@each(known=True, unknown=False)
def https_needs_a_known_authority(client, known):
    c = client()
    key, certificate = (os.path.join(c.folder, name) for name in ("key.pem", "certificate.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out",
         certificate, "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"],
        check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server(context)
    url = server.add("repository", c.repository)
    authorities = ["--ca", certificate] if known else []
    done = c.run(*authorities, "--metadata-url", f"{url}/metadata", "refresh")
    assert done == (0 if known else 1), c.message
    assert known or "certificate" in c.message, c.message


def main():
    command = os.path.abspath(sys.argv[1])
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    def work(item):
        number, (name, function) = item
        made = []

        def client(repository=None):
            made.append(Client(command, f"case{number}-{len(made)}", repository))
            return made[-1]

        try:
            function(client)
            return f"ok {name}"
        except Exception:
            return f"FAILED {name}\n{traceback.format_exc()}"
        finally:
            for one in made:
                one.close()

    failed = 0
    chosen = [item for item in enumerate(CASES.items()) if wanted in item[1][0]]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for result in pool.map(work, chosen):
            failed += result.startswith("FAILED")
            print(result)
    print(f"{len(CASES)} cases, {failed} failed")
    sys.exit(1 if failed else 0)


main()
