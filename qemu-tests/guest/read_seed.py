"""Has cloud-init read a seed: argument 1 is a folder to work in, 2 the volume (gzip, base64)."""

import base64
import gzip
import json
import pathlib
import subprocess
import sys

from cloudinit import helpers
from cloudinit.sources.DataSourceNoCloud import DataSourceNoCloud

folder = pathlib.Path(sys.argv[1])
volume = folder / "seed.img"
volume.write_bytes(gzip.decompress(base64.b64decode(sys.argv[2])))
label = subprocess.check_output(["blkid", "-p", "-o", "value", "-s", "LABEL", volume], text=True)
files = folder / "seed/nocloud"
files.mkdir(parents=True)
subprocess.check_call(["mcopy", "-i", volume, "::meta-data", "::user-data", files])

paths = helpers.Paths({"cloud_dir": str(folder), "run_dir": str(folder)})
source = DataSourceNoCloud({"datasource": {"NoCloud": {"fs_label": None}}}, None, paths)
told = {
    "label": label.strip(),
    "found": source.get_data(),
    "instance": source.get_instance_id(),
    "hostname": source.get_hostname().hostname,
    "keys": source.get_public_ssh_keys(),
    "user_data": source.get_userdata_raw().decode(),
}
print(json.dumps(told))
