//! To whom a targets role delegates which paths.
//!
//! Source: TUF specification 1.0.34, section 4.5; hash bins without a list of them ("succinct
//! roles"): TAP 15, as python-tuf makes them.

use aws_lc_rs::digest;

use super::{Keys, MAX_ROLE_NAME, MetadataError, RoleKeys, TOP_LEVEL, reader::Reader};
use crate::pattern;

/// Most roles that one role delegates to: hash bins of 15 bits.
const MAX_ROLES: usize = 32_768;
/// Most patterns or prefixes of one delegation.
const MAX_PATTERNS: usize = 32_768;
/// Most bits that number the bins of succinct roles, by TAP 15.
const MAX_BITS: u64 = 32;

/// The delegations of a role, in order of priority.
#[derive(Debug, Clone)]
pub struct Delegations {
    /// The keys that the delegations name.
    pub keys: Keys,
    roles: Roles,
}

#[derive(Debug, Clone)]
enum Roles {
    Bins(Bins),
    Listed(Vec<Delegation>),
}

/// One delegation.
#[derive(Debug, Clone)]
pub struct Delegation {
    /// The role that is trusted; names no top-level role.
    pub name: String,
    /// Who signs for it.
    pub signers: RoleKeys,
    /// Whether a search that comes here goes no further than this role's own delegations.
    pub terminating: bool,
    /// For which targets it is trusted.
    pub scope: Scope,
}

/// The targets that a delegation covers.
#[derive(Debug, Clone)]
pub enum Scope {
    /// Paths that match one of these patterns.
    Paths(Vec<String>),
    /// Paths whose SHA-256 in hexadecimal begins with one of these.
    HashPrefixes(Vec<String>),
}

/// Roles `PREFIX-00` to `PREFIX-ff`, one for each value of the first bits of a path's SHA-256.
#[derive(Debug, Clone)]
pub struct Bins {
    signers: RoleKeys,
    bits: u64,
    prefix: String,
}

/// A delegated role that a search has to look into.
#[derive(Debug, Clone)]
pub struct Visit {
    /// Name of the role.
    pub role: String,
    /// Who signs for it, according to the delegator on this way.
    pub signers: RoleKeys,
    /// Where these signers' keys are.
    pub keys: Keys,
}

impl Delegations {
    pub(crate) fn read(map: &Reader<'_>) -> Result<Self, MetadataError> {
        let keys = Keys::read(&map.field("keys")?)?;
        let roles = match (map.optional("roles")?, map.optional("succinct_roles")?) {
            (Some(list), None) => Roles::Listed(read_roles(&list)?),
            (None, Some(bins)) => Roles::Bins(Bins::read(&bins)?),
            _ => return Err(map.expected("either roles or succinct_roles")),
        };
        Ok(Self { keys, roles })
    }

    /// Returns who signs for a role, if it is delegated to by name.
    pub fn signers(&self, role: &str) -> Option<&RoleKeys> {
        match &self.roles {
            Roles::Bins(_) => None,
            Roles::Listed(roles) => {
                roles.iter().find(|listed| listed.name == role).map(|listed| &listed.signers)
            }
        }
    }

    /// Returns the roles to look into for `path`, in order, and whether the last of them ends the
    /// search (5.6.7.2).
    pub fn covering(&self, path: &str) -> (Vec<Visit>, Ending) {
        let mut visits = Vec::new();
        match &self.roles {
            Roles::Bins(bins) => {
                // Exactly one bin is responsible, whatever it holds (TAP 15: terminating).
                visits.push(self.visit(&bins.bin(path), &bins.signers));
                return (visits, Ending::Terminates);
            }
            Roles::Listed(roles) => {
                for role in roles.iter().filter(|role| role.scope.covers(path)) {
                    visits.push(self.visit(&role.name, &role.signers));
                    if role.terminating {
                        return (visits, Ending::Terminates);
                    }
                }
            }
        }
        (visits, Ending::GoesOn)
    }

    /// Returns the first `limit` roles, whatever they are trusted for.
    pub fn all(&self, limit: usize) -> Vec<Visit> {
        match &self.roles {
            Roles::Bins(bins) => {
                let names = bins.names().take(limit);
                names.map(|name| self.visit(&name, &bins.signers)).collect()
            }
            Roles::Listed(roles) => {
                roles.iter().take(limit).map(|role| self.visit(&role.name, &role.signers)).collect()
            }
        }
    }

    fn visit(&self, role: &str, signers: &RoleKeys) -> Visit {
        Visit { role: role.to_owned(), signers: signers.clone(), keys: self.keys.clone() }
    }
}

/// What a list of delegations does to the search that it is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Roles of lower priority follow.
    GoesOn,
    /// The last role covers the path and terminates.
    Terminates,
}

fn read_roles(list: &Reader<'_>) -> Result<Vec<Delegation>, MetadataError> {
    let mut roles: Vec<Delegation> = Vec::new();
    let mut names = std::collections::BTreeSet::new();
    for item in list.list(MAX_ROLES)? {
        let name = role_name(&item.field("name")?)?;
        if !names.insert(name.clone()) {
            return Err(MetadataError::Twice { at: list.at(), name });
        }
        let scope = match (item.optional("paths")?, item.optional("path_hash_prefixes")?) {
            (Some(paths), None) => Scope::Paths(texts(&paths)?),
            (None, Some(prefixes)) => Scope::HashPrefixes(texts(&prefixes)?),
            _ => return Err(item.expected("either paths or path_hash_prefixes")),
        };
        let terminating = item.field("terminating")?.boolean()?;
        roles.push(Delegation { name, signers: RoleKeys::read(&item)?, terminating, scope });
    }
    Ok(roles)
}

fn role_name(field: &Reader<'_>) -> Result<String, MetadataError> {
    let name = field.text()?;
    if name.is_empty() || TOP_LEVEL.contains(&name) {
        return Err(field.expected("a name that no top-level role has"));
    }
    if pattern::encode(name).len() > MAX_ROLE_NAME {
        return Err(field.expected("at most 240 bytes, percent-encoded"));
    }
    Ok(name.to_owned())
}

fn texts(list: &Reader<'_>) -> Result<Vec<String>, MetadataError> {
    list.list(MAX_PATTERNS)?.iter().map(|item| Ok(item.text()?.to_owned())).collect()
}

impl Scope {
    /// Whether the delegation is for `path`.
    pub fn covers(&self, path: &str) -> bool {
        match self {
            Self::Paths(patterns) => patterns.iter().any(|p| pattern::matches(p, path)),
            Self::HashPrefixes(prefixes) => {
                let digest =
                    types::hex::encode(digest::digest(&digest::SHA256, path.as_bytes()).as_ref());
                prefixes.iter().any(|prefix| digest.starts_with(prefix.as_str()))
            }
        }
    }
}

impl Bins {
    fn read(map: &Reader<'_>) -> Result<Self, MetadataError> {
        let field = map.field("bit_length")?;
        let bits = field.positive()?;
        if bits > MAX_BITS {
            return Err(field.expected("1 to 32 bits"));
        }
        let prefix = role_name(&map.field("name_prefix")?)?;
        Ok(Self { signers: RoleKeys::read(map)?, bits, prefix })
    }

    fn bin(&self, path: &str) -> String {
        let digest = digest::digest(&digest::SHA256, path.as_bytes());
        let first = digest.as_ref().iter().take(4);
        let number = first.fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        self.name(number >> (32 - self.bits))
    }

    fn names(&self) -> impl Iterator<Item = String> {
        (0..1u64 << self.bits).map(|number| self.name(number))
    }

    /// Names a bin: as many hexadecimal digits as the highest number needs.
    fn name(&self, number: u64) -> String {
        let digits = format!("{:x}", (1u64 << self.bits) - 1).len();
        format!("{}-{number:0digits$x}", self.prefix)
    }
}
