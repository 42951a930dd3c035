//! The bill of materials: every file of the root with the package and version it comes from.
//!
//! Pure: what cargo and dpkg said goes in, one JSON document comes out.
//! Source: SPDX Specification 2.3, §5 to §11, and its JSON schema.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use sha1::Digest as _;

/// A package of the document.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Where it comes from.
    pub origin: Origin,
    /// SPDX licence expression, or `NOASSERTION`.
    pub licence: String,
}

/// Where a package comes from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// This repository.
    Own,
    /// The Rust registry.
    Crate,
    /// Debian.
    Debian,
    /// The Rust toolchain.
    Toolchain,
}

/// A file of the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Absolute path in the image.
    pub path: String,
    /// Its content.
    pub content: Vec<u8>,
    /// Why it is there.
    pub reason: String,
    /// Name of the package that it is built from; must be in the document.
    pub package: String,
}

/// Everything that the document says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Materials {
    /// All packages.
    pub packages: BTreeSet<Package>,
    /// Which package is linked into or used by which, by name and version.
    pub dependencies: BTreeSet<(String, String)>,
    /// All files.
    pub files: Vec<File>,
}

/// Why cargo's description of the workspace cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum SbomError {
    #[error("cargo metadata printed no JSON")]
    Json(#[from] serde_json::Error),
    #[error("cargo metadata lacks {0}")]
    Field(&'static str),
    #[error("cargo metadata knows no package {0}")]
    NoPackage(String),
}

impl Package {
    /// Identifier inside the document.
    fn id(&self) -> String {
        format!("SPDXRef-Package-{}-{}", clean(&self.name), clean(&self.version))
    }

    fn url(&self) -> Option<String> {
        let Self { name, version, .. } = self;
        match self.origin {
            Origin::Crate => Some(format!("pkg:cargo/{name}@{version}")),
            Origin::Debian => {
                Some(format!("pkg:deb/debian/{name}@{}", version.replace('+', "%2B")))
            }
            Origin::Own | Origin::Toolchain => None,
        }
    }

    fn json(&self) -> Value {
        let mut package = json!({
            "SPDXID": self.id(),
            "name": self.name,
            "versionInfo": self.version,
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": false,
            "licenseConcluded": "NOASSERTION",
            "licenseDeclared": self.licence,
            "copyrightText": "NOASSERTION",
            "supplier": match self.origin {
                Origin::Own => "Organization: Holdfast",
                Origin::Crate => "NOASSERTION",
                Origin::Debian => "Organization: Debian",
                Origin::Toolchain => "Organization: Rust",
            },
        });
        if let Some(url) = self.url() {
            package["externalRefs"] = json!([{
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": url,
            }]);
        }
        package
    }
}

/// Identifiers may hold letters, digits, dots and hyphens only (§3.2).
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect()
}

impl Materials {
    /// Adds a workspace package and everything that is linked into it, from the output of
    /// `cargo metadata`. Build scripts and tests do not count: they are not in the image.
    pub fn add_crates(&mut self, metadata: &str, roots: &[&str]) -> Result<(), SbomError> {
        let metadata: Value = serde_json::from_str(metadata)?;
        let packages = by_id(&metadata)?;
        let edges = normal_dependencies(&metadata)?;
        let mut open: Vec<&str> = Vec::new();
        for root in roots {
            let id = packages
                .iter()
                .find(|(_, package)| package["name"] == *root && package["source"].is_null())
                .ok_or_else(|| SbomError::NoPackage((*root).to_owned()))?;
            open.push(id.0);
        }
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        while let Some(id) = open.pop() {
            if !seen.insert(id) {
                continue;
            }
            let package = describe(packages.get(id).ok_or(SbomError::Field("a package"))?)?;
            for dependency in edges.get(id).into_iter().flatten() {
                let other =
                    describe(packages.get(dependency).ok_or(SbomError::Field("a package"))?)?;
                self.dependencies.insert((package.id(), other.id()));
                open.push(dependency);
            }
            self.packages.insert(package);
        }
        Ok(())
    }

    /// Adds a package that others are built from.
    pub fn add_input(&mut self, package: Package, used_by: &[&str]) {
        for user in used_by {
            let users =
                self.packages.iter().filter(|p| p.name == **user && p.origin == Origin::Own);
            let ids: Vec<_> = users.map(Package::id).collect();
            for id in ids {
                self.dependencies.insert((id, package.id()));
            }
        }
        self.packages.insert(package);
    }

    /// The document. `created` is an RFC 3339 time, `version` the release's.
    pub fn document(&self, version: &str, created: &str) -> Value {
        let files: Vec<_> = self.files.iter().map(File::json).collect();
        let packages: Vec<_> = self.packages.iter().map(Package::json).collect();
        let mut relationships = Vec::new();
        for package in self.packages.iter().filter(|p| p.origin == Origin::Own) {
            relationships.push(relationship("SPDXRef-DOCUMENT", "DESCRIBES", &package.id()));
        }
        for (user, used) in &self.dependencies {
            relationships.push(relationship(user, "DEPENDS_ON", used));
        }
        for file in &self.files {
            if let Some(package) = self.packages.iter().find(|p| p.name == file.package) {
                relationships.push(relationship(&file.id(), "GENERATED_FROM", &package.id()));
            }
        }
        let content = json!({
            "packages": packages,
            "files": files,
            "relationships": relationships,
        });
        let digest = crate::sha256_hex(content.to_string().as_bytes());
        json!({
            "spdxVersion": "SPDX-2.3",
            "dataLicense": "CC0-1.0",
            "SPDXID": "SPDXRef-DOCUMENT",
            "name": format!("holdfast-{version}"),
            "documentNamespace": format!("https://holdfast.invalid/spdx/{digest}"),
            "creationInfo": {
                "created": created,
                "creators": [format!("Tool: holdfast-image-{version}")],
            },
            "packages": content["packages"],
            "files": content["files"],
            "relationships": content["relationships"],
        })
    }
}

impl File {
    fn id(&self) -> String {
        format!("SPDXRef-File{}", clean(&self.path))
    }

    fn json(&self) -> Value {
        let sha1 = crate::hex(&sha1::Sha1::digest(&self.content));
        json!({
            "SPDXID": self.id(),
            "fileName": format!(".{}", self.path),
            "checksums": [
                { "algorithm": "SHA1", "checksumValue": sha1 },
                { "algorithm": "SHA256", "checksumValue": crate::sha256_hex(&self.content) },
            ],
            "licenseConcluded": "NOASSERTION",
            "copyrightText": "NOASSERTION",
            "comment": self.reason,
        })
    }
}

fn relationship(from: &str, kind: &str, to: &str) -> Value {
    json!({
        "spdxElementId": from,
        "relationshipType": kind,
        "relatedSpdxElement": to,
    })
}

fn by_id(metadata: &Value) -> Result<BTreeMap<&str, &Value>, SbomError> {
    let packages = metadata["packages"].as_array().ok_or(SbomError::Field("packages"))?;
    packages.iter().map(|package| Ok((text(package, "id")?, package))).collect()
}

fn normal_dependencies(metadata: &Value) -> Result<BTreeMap<&str, Vec<&str>>, SbomError> {
    let nodes = metadata["resolve"]["nodes"].as_array().ok_or(SbomError::Field("resolve.nodes"))?;
    let mut edges = BTreeMap::new();
    for node in nodes {
        let dependencies = node["deps"].as_array().ok_or(SbomError::Field("deps"))?;
        let mut targets = Vec::new();
        for dependency in dependencies {
            let kinds = dependency["dep_kinds"].as_array().ok_or(SbomError::Field("dep_kinds"))?;
            if kinds.iter().any(|kind| kind["kind"].is_null()) {
                targets.push(text(dependency, "pkg")?);
            }
        }
        edges.insert(text(node, "id")?, targets);
    }
    Ok(edges)
}

fn describe(package: &Value) -> Result<Package, SbomError> {
    Ok(Package {
        name: text(package, "name")?.to_owned(),
        version: text(package, "version")?.to_owned(),
        origin: if package["source"].is_null() { Origin::Own } else { Origin::Crate },
        licence: licence(package["license"].as_str()),
    })
}

/// Old crates write `A/B` where SPDX says `A OR B`.
fn licence(declared: Option<&str>) -> String {
    match declared {
        Some(text) => text.replace('/', " OR ").replace("  ", " "),
        None => "NOASSERTION".to_owned(),
    }
}

fn text<'a>(value: &'a Value, key: &'static str) -> Result<&'a str, SbomError> {
    value[key].as_str().ok_or(SbomError::Field(key))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    const METADATA: &str = r#"{
        "packages": [
            {"id": "a", "name": "agent", "version": "0.1.0", "source": null, "license": "Apache-2.0"},
            {"id": "b", "name": "serde", "version": "1.0.0", "source": "registry", "license": "MIT/Apache-2.0"},
            {"id": "c", "name": "cc", "version": "1.0.0", "source": "registry", "license": "MIT"}
        ],
        "resolve": {"nodes": [
            {"id": "a", "deps": [
                {"pkg": "b", "dep_kinds": [{"kind": null}]},
                {"pkg": "c", "dep_kinds": [{"kind": "build"}]}
            ]},
            {"id": "b", "deps": []},
            {"id": "c", "deps": []}
        ]}
    }"#;

    fn materials() -> Materials {
        let mut materials = Materials::default();
        materials.add_crates(METADATA, &["agent"]).unwrap();
        materials.add_input(
            Package {
                name: "linux-source-7.3".to_owned(),
                version: "7.3.4-1~bpo13+1".to_owned(),
                origin: Origin::Debian,
                licence: "GPL-2.0-only".to_owned(),
            },
            &["agent"],
        );
        materials.files.push(File {
            path: "/usr/bin/agent".to_owned(),
            content: b"abc".to_vec(),
            reason: "the node service".to_owned(),
            package: "agent".to_owned(),
        });
        materials
    }

    #[test]
    fn linked_crates_count_and_build_tools_do_not() {
        let names: Vec<_> = materials().packages.into_iter().map(|p| p.name).collect();
        assert_eq!(names, ["agent", "linux-source-7.3", "serde"]);
    }

    #[test]
    fn every_file_has_checksums_and_a_package() {
        let document = materials().document("0.1.0", "2026-01-01T00:00:00Z");
        let file = &document["files"][0];
        assert_eq!(file["fileName"], "./usr/bin/agent");
        assert_eq!(
            file["checksums"][0]["checksumValue"],
            "a9993e364706816aba3e25717850c26c9cd0d89d"
        );
        let origin = document["relationships"]
            .as_array()
            .unwrap()
            .iter()
            .find(|r| r["relationshipType"] == "GENERATED_FROM")
            .unwrap();
        assert_eq!(origin["relatedSpdxElement"], "SPDXRef-Package-agent-0.1.0");
        assert_eq!(origin["spdxElementId"], file["SPDXID"]);
    }

    #[test]
    fn identifiers_are_unique_and_clean() {
        let document = materials().document("0.1.0", "2026-01-01T00:00:00Z");
        let ids: Vec<_> = document["packages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|p| p["SPDXID"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
        assert!(ids.contains(&"SPDXRef-Package-linux-source-7.3-7.3.4-1-bpo13-1".to_owned()));
    }

    #[test]
    fn an_old_licence_expression_is_modernised() {
        assert_eq!(licence(Some("MIT/Apache-2.0")), "MIT OR Apache-2.0");
        assert_eq!(licence(None), "NOASSERTION");
    }

    #[test]
    fn an_unknown_root_is_refused() {
        let error = Materials::default().add_crates(METADATA, &["nobody"]);
        assert!(matches!(error, Err(SbomError::NoPackage(_))));
    }
}
