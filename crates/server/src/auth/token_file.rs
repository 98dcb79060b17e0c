//! Tokens in a file: created and revoked by a command, read by servers while they run.
//!
//! A token is `atoll_ID_SECRET`; the secret has 256 random bits. The file holds its SHA-256, so
//! that reading the file gives no access. A slow hash would add nothing: such a secret cannot be
//! guessed.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::grant::{Grant, GrantRecord};
use super::usage::Usage;
use super::{Identity, Reason, Refusal, unix_seconds};

const PREFIX: &str = "atoll_";
/// Maximum size of the file.
const MAX_BYTES: u64 = 16 << 20;
/// Version of the file's format.
const FORMAT: u32 = 1;

/// Why tokens cannot be read or written.
#[derive(Debug, Error)]
pub enum TokenError {
    /// The file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file's content is not valid.
    #[error("{path}: {reason}")]
    Content {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// There is no such token.
    #[error("there is no token '{0}'")]
    Unknown(String),
    /// The token would be of no use, or the system gives no random numbers.
    #[error("{0}")]
    Refused(String),
}

/// A token as the file describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// Its id, the public part of the token.
    pub id: String,
    /// What it is for, in words.
    #[serde(default)]
    pub name: String,
    /// SHA-256 of its secret, in hexadecimal.
    sha256: String,
    /// What it allows.
    pub grant: GrantRecord,
    /// When it was created, in seconds since 1970.
    pub created: u64,
    /// When it expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<u64>,
    /// When it was revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<u64>,
}

impl TokenRecord {
    /// `valid`, `expired` or `revoked` at this time in seconds since 1970.
    pub fn state(&self, now: u64) -> &'static str {
        match (self.revoked, self.expires) {
            (Some(_), _) => "revoked",
            (None, Some(expires)) if expires <= now => "expired",
            _ => "valid",
        }
    }
}

/// A token to create.
#[derive(Clone, Debug, Default)]
pub struct NewToken {
    /// What it is for, in words.
    pub name: String,
    /// What it allows.
    pub grant: GrantRecord,
    /// Seconds until it expires.
    pub lifetime: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    format: u32,
    tokens: Vec<TokenRecord>,
}

/// A file of tokens.
#[derive(Clone, Debug)]
pub struct TokenFile {
    path: PathBuf,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of a SHA-256 in hexadecimal.
fn unhex(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
    let bytes = digits.chunks_exact(2).map(|pair| (pair[0] << 4 | pair[1]) as u8);
    (digits.len() == 64).then(|| bytes.collect::<Vec<u8>>().try_into().ok())?
}

impl TokenFile {
    /// The file at `path`, which need not exist.
    pub fn new(path: impl Into<PathBuf>) -> TokenFile {
        TokenFile { path: path.into() }
    }

    /// All tokens; none if the file does not exist.
    pub fn list(&self) -> Result<Vec<TokenRecord>, TokenError> {
        match read(&self.path) {
            Err(TokenError::File { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                Ok(Vec::new())
            }
            tokens => tokens,
        }
    }

    /// Creates a token and returns it. It is not stored and cannot be shown again.
    pub fn create(&self, new: NewToken) -> Result<String, TokenError> {
        let refused = |why: &str| TokenError::Refused(why.to_string());
        if new.grant.scopes.is_empty() {
            return Err(refused("a token without a scope is of no use"));
        }
        new.grant.grant().map_err(TokenError::Refused)?;
        let (mut id, mut secret) = ([0; 8], [0; 32]);
        let random = SystemRandom::new();
        random
            .fill(&mut id)
            .and_then(|()| random.fill(&mut secret))
            .map_err(|_| refused("the system gives no random numbers"))?;
        let (id, secret) = (hex(&id), URL_SAFE_NO_PAD.encode(secret));
        let created = unix_seconds();
        let record = TokenRecord {
            id: id.clone(),
            name: new.name,
            sha256: hex(&Sha256::digest(&secret)),
            grant: new.grant,
            created,
            expires: new.lifetime.map(|seconds| created.saturating_add(seconds)),
            revoked: None,
        };
        self.change(|tokens| {
            tokens.push(record);
            Ok(())
        })?;
        Ok(format!("{PREFIX}{id}_{secret}"))
    }

    /// Revokes the token of this id.
    pub fn revoke(&self, id: &str) -> Result<(), TokenError> {
        self.change(|tokens| {
            let found = tokens.iter_mut().find(|token| token.id == id);
            let found = found.ok_or_else(|| TokenError::Unknown(id.to_string()))?;
            found.revoked.get_or_insert_with(unix_seconds);
            Ok(())
        })
    }

    /// Replaces the file's content under a lock, so that no change is lost.
    fn change(
        &self,
        change: impl FnOnce(&mut Vec<TokenRecord>) -> Result<(), TokenError>,
    ) -> Result<(), TokenError> {
        let failed = |source| TokenError::File { path: self.path.clone(), source };
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(failed)?;
        let lock = private().create(true).truncate(false).open(self.beside("lock"));
        let lock = lock.map_err(failed)?;
        lock.lock().map_err(failed)?;
        let mut tokens = self.list()?;
        change(&mut tokens)?;
        let content = Content { format: FORMAT, tokens };
        let text = serde_json::to_vec_pretty(&content)
            .map_err(|error| TokenError::Refused(error.to_string()))?;
        let part = self.beside("part");
        let mut file = private().create(true).truncate(true).open(&part).map_err(failed)?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed)?;
        std::fs::rename(&part, &self.path).map_err(failed)?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
    }

    fn beside(&self, ending: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".");
        name.push(ending);
        name.into()
    }
}

/// A file that only its owner may read.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    options
}

fn read(path: &Path) -> Result<Vec<TokenRecord>, TokenError> {
    let failed = |source| TokenError::File { path: path.to_path_buf(), source };
    let wrong = |reason: String| TokenError::Content { path: path.to_path_buf(), reason };
    if std::fs::metadata(path).map_err(failed)?.len() > MAX_BYTES {
        return Err(wrong(format!("a file of tokens has at most {MAX_BYTES} bytes")));
    }
    let text = std::fs::read(path).map_err(failed)?;
    let content: Content =
        serde_json::from_slice(&text).map_err(|error| wrong(format!("not tokens: {error}")))?;
    match content.format {
        FORMAT => Ok(content.tokens),
        other => Err(wrong(format!("format {other} is not known to this version"))),
    }
}

/// Whether a bearer token looks like one of ours.
pub(crate) fn is_token(text: &str) -> bool {
    text.starts_with(PREFIX)
}

/// Compares in a time that does not depend on where they differ.
fn equal(a: &[u8], b: &[u8]) -> bool {
    let difference = a.iter().zip(b).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
    a.len() == b.len() && difference == 0
}

struct Entry {
    sha256: [u8; 32],
    revoked: bool,
    expires: Option<u64>,
    grant: Arc<Grant>,
    subject: Arc<str>,
    usage: Arc<Usage>,
}

/// The tokens that a server knows.
pub(crate) struct TokenTable(HashMap<String, Entry>);

impl TokenTable {
    /// Reads the file. Tokens of `before` keep what they have used.
    pub(crate) fn read(path: &Path, before: Option<&TokenTable>) -> Result<TokenTable, String> {
        let tokens = read(path).map_err(|error| error.to_string())?;
        let entry = |token: TokenRecord| {
            let known = before.and_then(|before| before.0.get(&token.id));
            let grant = token.grant.grant();
            let wrong = |why: &str| format!("{}: {}: {why}", path.display(), token.id);
            let grant = grant.map_err(|why| wrong(&why))?;
            let sha256 = unhex(&token.sha256).ok_or_else(|| wrong("sha256 has 64 digits"))?;
            let entry = Entry {
                sha256,
                revoked: token.revoked.is_some(),
                expires: token.expires,
                grant: Arc::new(grant),
                subject: format!("token:{}", token.id).into(),
                usage: known.map(|known| known.usage.clone()).unwrap_or_default(),
            };
            Ok((token.id, entry))
        };
        tokens.into_iter().map(entry).collect::<Result<_, String>>().map(TokenTable)
    }

    /// Whose token this is.
    pub(crate) fn identify(&self, token: &str, now: u64) -> Result<Identity, Refusal> {
        let wrong = || Refusal::new(Reason::WrongToken, "the token is not valid");
        let token = token.strip_prefix(PREFIX).ok_or_else(wrong)?;
        let (id, secret) = token.split_once('_').ok_or_else(wrong)?;
        let entry = self.0.get(id).ok_or_else(wrong)?;
        if !equal(&Sha256::digest(secret), &entry.sha256) || entry.revoked {
            return Err(wrong());
        }
        if entry.expires.is_some_and(|expires| expires <= now) {
            return Err(Refusal::new(Reason::ExpiredToken, "the token has expired"));
        }
        Ok((entry.grant.clone(), entry.subject.clone(), entry.usage.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Scope;
    use super::*;

    fn infer() -> NewToken {
        let grant = GrantRecord { scopes: vec![Scope::Infer], ..GrantRecord::default() };
        NewToken { name: "test".to_string(), grant, lifetime: None }
    }

    fn reason(table: &TokenTable, token: &str, now: u64) -> Option<Reason> {
        table.identify(token, now).err().map(|refusal| refusal.reason)
    }

    #[test]
    fn tokens_are_created_checked_and_revoked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/tokens");
        let file = TokenFile::new(&path);
        let (first, second) = (file.create(infer()).unwrap(), file.create(infer()).unwrap());
        let text = std::fs::read_to_string(&path).unwrap();
        // The secret may have underscores of its own.
        let secret = first[PREFIX.len()..].split_once('_').unwrap().1;
        assert!(!text.contains(&first) && !text.contains(secret));
        let table = TokenTable::read(&path, None).unwrap();
        assert_eq!(reason(&table, &first, 0), None);
        let swapped = format!("{}{secret}", &second[..second.find('_').unwrap() + 18]);
        for wrong in [
            "",
            "atoll_",
            "atoll__",
            "atoll_x_y",
            &first[..first.len() - 1],
            &swapped,
            &format!("{first}A"),
        ] {
            assert_eq!(reason(&table, wrong, 0), Some(Reason::WrongToken), "{wrong}");
        }
        let id = first.split('_').nth(1).unwrap();
        file.revoke(id).unwrap();
        assert!(matches!(file.revoke("nobody"), Err(TokenError::Unknown(_))));
        let table = TokenTable::read(&path, Some(&table)).unwrap();
        assert_eq!(reason(&table, &first, 0), Some(Reason::WrongToken));
        assert_eq!(reason(&table, &second, 0), None);
        let states: Vec<_> = file.list().unwrap().iter().map(|token| token.state(0)).collect();
        assert_eq!(states, ["revoked", "valid"]);
    }

    #[test]
    fn expired_tokens_and_broken_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let file = TokenFile::new(&path);
        let token = file.create(NewToken { lifetime: Some(10), ..infer() }).unwrap();
        let table = TokenTable::read(&path, None).unwrap();
        let now = unix_seconds();
        assert_eq!(reason(&table, &token, now), None);
        assert_eq!(reason(&table, &token, now + 11), Some(Reason::ExpiredToken));
        assert!(file.create(NewToken::default()).is_err());
        let bad = GrantRecord { classes: vec!["fast".to_string()], ..infer().grant };
        assert!(file.create(NewToken { grant: bad, ..infer() }).is_err());
        let text = std::fs::read_to_string(&path).unwrap();
        let digest = text.split("sha256\": \"").nth(1).unwrap()[..64].to_string();
        for wrong in ["", &digest[1..], &digest.replacen(|_| true, "x", 1)] {
            std::fs::write(&path, text.replace(&digest, wrong)).unwrap();
            assert!(TokenTable::read(&path, None).is_err(), "{wrong}");
        }
        for broken in ["", "{}", r#"{"format":2,"tokens":[]}"#] {
            std::fs::write(&path, broken).unwrap();
            assert!(TokenTable::read(&path, None).is_err(), "{broken}");
            // A broken file is not replaced by an empty one.
            assert!(file.create(infer()).is_err(), "{broken}");
        }
    }

    #[test]
    fn only_the_owner_may_read_the_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        TokenFile::new(&path).create(infer()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
