//! JSON Web Tokens, verified with the public keys of a key set file (OIDC).
//!
//! Only three algorithms exist here, and each belongs to one type of key: a token's header chooses
//! among the keys, never how a key is used. So `none`, and HMAC keyed with a public key, cannot
//! verify.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
    UnparsedPublicKey,
};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::grant::{Grant, GrantRecord, Scope};
use super::usage::Usage;
use super::{Identity, Reason, Refusal};

/// Maximum length of a token.
const MAX_TOKEN: usize = 16 << 10;
/// Maximum size of a key set file.
const MAX_KEY_SET: u64 = 1 << 20;
/// Seconds by which clocks may differ.
const LEEWAY: u64 = 30;
/// Maximum number of verified tokens and of subjects that are remembered.
const MAX_KNOWN: usize = 4096;

/// Which JSON Web Tokens are accepted.
#[derive(Clone, Debug)]
pub struct JwtOptions {
    /// The key set (JWKS) with the issuer's public keys; read again when it changes.
    pub keys: PathBuf,
    /// Required issuer (`iss`).
    pub issuer: String,
    /// Required audience (`aud`).
    pub audience: String,
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<Value>,
}

#[derive(Deserialize)]
struct KeyText {
    kty: String,
    kid: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    alg: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

enum PublicKey {
    Rsa { n: Vec<u8>, e: Vec<u8> },
    P256(Vec<u8>),
    Ed25519(Vec<u8>),
}

impl PublicKey {
    /// The only algorithm that this key verifies.
    fn algorithm(&self) -> &'static str {
        match self {
            PublicKey::Rsa { .. } => "RS256",
            PublicKey::P256(_) => "ES256",
            PublicKey::Ed25519(_) => "EdDSA",
        }
    }

    fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            PublicKey::Rsa { n, e } => RsaPublicKeyComponents { n, e }
                .verify(&RSA_PKCS1_2048_8192_SHA256, message, signature)
                .is_ok(),
            PublicKey::P256(point) => UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point)
                .verify(message, signature)
                .is_ok(),
            PublicKey::Ed25519(point) => {
                UnparsedPublicKey::new(&ED25519, point).verify(message, signature).is_ok()
            }
        }
    }
}

struct Key {
    id: Option<String>,
    key: PublicKey,
}

fn field(value: Option<&String>, name: &str) -> Result<Vec<u8>, String> {
    let text = value.ok_or_else(|| format!("it has no '{name}'"))?;
    URL_SAFE_NO_PAD.decode(text).map_err(|_| format!("'{name}' is not base64url"))
}

/// One key; `None` for keys of other types and purposes, which a set may hold too.
fn read_key(value: &Value) -> Result<Option<Key>, String> {
    let text = KeyText::deserialize(value).map_err(|error| error.to_string())?;
    if text.purpose.as_deref().is_some_and(|purpose| purpose != "sig") {
        return Ok(None);
    }
    let without_zeros = |bytes: Vec<u8>| {
        let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
        bytes[zeros..].to_vec()
    };
    let sized = |bytes: Vec<u8>, name: &str| match bytes.len() {
        32 => Ok(bytes),
        other => Err(format!("'{name}' has {other} bytes instead of 32")),
    };
    let key = match (text.kty.as_str(), text.crv.as_deref()) {
        ("RSA", _) => PublicKey::Rsa {
            n: without_zeros(field(text.n.as_ref(), "n")?),
            e: without_zeros(field(text.e.as_ref(), "e")?),
        },
        ("EC", Some("P-256")) => {
            let x = sized(field(text.x.as_ref(), "x")?, "x")?;
            let y = sized(field(text.y.as_ref(), "y")?, "y")?;
            PublicKey::P256([&[4][..], &x, &y].concat())
        }
        ("OKP", Some("Ed25519")) => PublicKey::Ed25519(sized(field(text.x.as_ref(), "x")?, "x")?),
        _ => return Ok(None),
    };
    if text.alg.as_deref().is_some_and(|alg| alg != key.algorithm()) {
        return Ok(None);
    }
    Ok(Some(Key { id: text.kid, key }))
}

/// A verified token.
#[derive(Clone)]
struct Verified {
    grant: Arc<Grant>,
    subject: Arc<str>,
    expires: u64,
    not_before: u64,
}

/// The keys of an issuer, and what has been verified with them.
pub(crate) struct JwtKeys {
    keys: Vec<Key>,
    issuer: String,
    audience: String,
    /// By SHA-256 of the token: most requests come with a token that came before.
    verified: Mutex<HashMap<[u8; 32], Verified>>,
    usage: Mutex<HashMap<Arc<str>, Arc<Usage>>>,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

#[derive(Deserialize)]
struct Claims {
    iss: Option<String>,
    sub: Option<String>,
    aud: Option<Texts>,
    exp: Option<f64>,
    nbf: Option<f64>,
    scope: Option<Texts>,
    scp: Option<Texts>,
    atoll: Option<GrantRecord>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Several(Vec<String>),
}

impl Texts {
    fn contains(&self, text: &str) -> bool {
        match self {
            Texts::One(one) => one == text,
            Texts::Several(several) => several.iter().any(|one| one == text),
        }
    }

    fn words(&self) -> Vec<&str> {
        match self {
            Texts::One(one) => one.split_whitespace().collect(),
            Texts::Several(several) => several.iter().map(String::as_str).collect(),
        }
    }
}

fn wrong(why: &str) -> Refusal {
    Refusal::new(Reason::WrongToken, format!("the token is not valid: {why}"))
}

impl JwtKeys {
    /// Reads a key set.
    pub(crate) fn read(path: &Path, options: &JwtOptions) -> Result<JwtKeys, String> {
        let failed = |why: String| format!("{}: {why}", path.display());
        let size = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
        if size > MAX_KEY_SET {
            return Err(failed(format!("a key set has at most {MAX_KEY_SET} bytes")));
        }
        let text = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
        let set: KeySet = serde_json::from_slice(&text)
            .map_err(|error| failed(format!("not a key set: {error}")))?;
        let mut keys = Vec::new();
        for (index, value) in set.keys.iter().enumerate() {
            let key = read_key(value).map_err(|why| failed(format!("key {index}: {why}")))?;
            keys.extend(key);
        }
        if keys.is_empty() {
            return Err(failed("no key for RS256, ES256 or EdDSA".to_string()));
        }
        Ok(JwtKeys {
            keys,
            issuer: options.issuer.clone(),
            audience: options.audience.clone(),
            verified: Mutex::default(),
            usage: Mutex::default(),
        })
    }

    /// Whose token this is.
    pub(crate) fn identify(&self, token: &str, now: u64) -> Result<Identity, Refusal> {
        if token.len() > MAX_TOKEN {
            return Err(wrong("it is too long"));
        }
        let digest: [u8; 32] = Sha256::digest(token).into();
        let known = lock(&self.verified).get(&digest).cloned();
        let verified = match known {
            Some(verified) => verified,
            None => {
                let verified = self.verify(token)?;
                let mut known = lock(&self.verified);
                if known.len() >= MAX_KNOWN {
                    known.clear();
                }
                known.insert(digest, verified.clone());
                verified
            }
        };
        if verified.expires.saturating_add(LEEWAY) <= now {
            return Err(Refusal::new(Reason::ExpiredToken, "the token has expired"));
        }
        if verified.not_before > now.saturating_add(LEEWAY) {
            return Err(wrong("it is not valid yet"));
        }
        let usage = self.usage_of(&verified.subject);
        Ok((verified.grant, verified.subject, usage))
    }

    fn usage_of(&self, subject: &Arc<str>) -> Arc<Usage> {
        let mut usage = lock(&self.usage);
        if usage.len() >= MAX_KNOWN && !usage.contains_key(subject) {
            usage.retain(|_, usage| usage.in_flight() > 0);
        }
        usage.entry(subject.clone()).or_default().clone()
    }

    fn verify(&self, token: &str) -> Result<Verified, Refusal> {
        let (signed, signature) = token.rsplit_once('.').ok_or_else(|| wrong("no signature"))?;
        let (header, claims) = signed.split_once('.').ok_or_else(|| wrong("no claims"))?;
        let decode =
            |text: &str| URL_SAFE_NO_PAD.decode(text).map_err(|_| wrong("it is not base64url"));
        let signature = decode(signature)?;
        let header: Header =
            serde_json::from_slice(&decode(header)?).map_err(|_| wrong("its header"))?;
        if header.crit.is_some() {
            return Err(wrong("it has a critical extension"));
        }
        let fits = |key: &&Key| {
            let named = header.kid.is_none() || key.id.is_none() || header.kid == key.id;
            key.key.algorithm() == header.alg && named
        };
        let mut candidates = self.keys.iter().filter(fits);
        if !candidates.any(|key| key.key.verifies(signed.as_bytes(), &signature)) {
            return Err(wrong("no key verifies its signature"));
        }
        let claims: Claims =
            serde_json::from_slice(&decode(claims)?).map_err(|_| wrong("its claims"))?;
        self.check_claims(claims)
    }

    fn check_claims(&self, claims: Claims) -> Result<Verified, Refusal> {
        if claims.iss.as_ref() != Some(&self.issuer) {
            return Err(wrong("it is of another issuer"));
        }
        if !claims.aud.as_ref().is_some_and(|aud| aud.contains(&self.audience)) {
            return Err(wrong("it is for another audience"));
        }
        let expires = claims.exp.ok_or_else(|| wrong("it does not expire"))?;
        let mut record = claims.atoll.unwrap_or_default();
        let scopes = [&claims.scope, &claims.scp].into_iter().flatten().flat_map(Texts::words);
        // Scopes of other services are no concern of ours.
        let own = |name: &str| name.strip_prefix("atoll:").unwrap_or(name).parse::<Scope>().ok();
        record.scopes.extend(scopes.filter_map(own));
        let grant = record.grant().map_err(|why| wrong(&why))?;
        let subject = claims.sub.unwrap_or_default();
        Ok(Verified {
            grant: Arc::new(grant),
            subject: format!("jwt:{}", subject.chars().take(128).collect::<String>()).into(),
            expires: expires as u64,
            not_before: claims.nbf.unwrap_or(0.0) as u64,
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};
    use serde_json::json;

    use super::*;

    struct Issuer {
        keys: JwtKeys,
        ed25519: Ed25519KeyPair,
        p256: EcdsaKeyPair,
        _folder: tempfile::TempDir,
    }

    fn encode(bytes: impl AsRef<[u8]>) -> String {
        URL_SAFE_NO_PAD.encode(bytes)
    }

    fn issuer() -> Issuer {
        let random = SystemRandom::new();
        let ed25519 = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
        let ed25519 = Ed25519KeyPair::from_pkcs8(ed25519.as_ref()).unwrap();
        let signing = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let p256 = EcdsaKeyPair::generate_pkcs8(signing, &random).unwrap();
        let p256 = EcdsaKeyPair::from_pkcs8(signing, p256.as_ref(), &random).unwrap();
        let point = p256.public_key().as_ref();
        let set = json!({"keys": [
            {"kty": "OKP", "crv": "Ed25519", "kid": "a", "x": encode(ed25519.public_key())},
            {"kty": "EC", "crv": "P-256", "kid": "b", "x": encode(&point[1..33]),
             "y": encode(&point[33..])},
            {"kty": "oct", "k": "AAAA"},
        ]});
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jwks.json");
        std::fs::write(&path, set.to_string()).unwrap();
        let options = JwtOptions {
            keys: path.clone(),
            issuer: "https://issuer.example".to_string(),
            audience: "atoll".to_string(),
        };
        let keys = JwtKeys::read(&path, &options).unwrap();
        Issuer { keys, ed25519, p256, _folder: folder }
    }

    fn claims() -> Value {
        json!({"iss": "https://issuer.example", "aud": ["x", "atoll"], "sub": "me", "exp": 1000,
               "nbf": 500, "scope": "openid infer", "atoll": {"models": ["a*"]}})
    }

    fn with(name: &str, value: Value) -> Value {
        let mut claims = claims();
        claims[name] = value;
        claims
    }

    impl Issuer {
        fn sign(&self, header: Value, claims: &Value) -> String {
            let signed = format!("{}.{}", encode(header.to_string()), encode(claims.to_string()));
            let signature = match header["alg"].as_str().unwrap() {
                "ES256" => {
                    let random = SystemRandom::new();
                    self.p256.sign(&random, signed.as_bytes()).unwrap().as_ref().to_vec()
                }
                "HS256" => {
                    // The attack: HMAC with the public key as secret.
                    let key = self.ed25519.public_key();
                    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, key.as_ref());
                    ring::hmac::sign(&key, signed.as_bytes()).as_ref().to_vec()
                }
                "none" => Vec::new(),
                _ => self.ed25519.sign(signed.as_bytes()).as_ref().to_vec(),
            };
            format!("{signed}.{}", encode(signature))
        }

        fn reason(&self, token: &str, now: u64) -> Option<Reason> {
            self.keys.identify(token, now).err().map(|refusal| refusal.reason)
        }
    }

    #[test]
    fn signed_tokens_give_their_grant() {
        let issuer = issuer();
        for header in [
            json!({"alg": "EdDSA", "kid": "a"}),
            json!({"alg": "ES256", "kid": "b"}),
            json!({"alg": "EdDSA"}),
        ] {
            let token = issuer.sign(header, &claims());
            let (grant, subject, _) = issuer.keys.identify(&token, 700).ok().unwrap();
            assert_eq!(&*subject, "jwt:me");
            assert!(grant.allows_model("abc") && !grant.allows_model("b"));
            assert_eq!(issuer.reason(&token, 2000), Some(Reason::ExpiredToken));
            assert_eq!(issuer.reason(&token, 100), Some(Reason::WrongToken));
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let issuer = issuer();
        let eddsa = || json!({"alg": "EdDSA"});
        let good = issuer.sign(eddsa(), &claims());
        let mut tokens = vec![
            issuer.sign(json!({"alg": "none"}), &claims()),
            issuer.sign(json!({"alg": "HS256"}), &claims()),
            issuer.sign(json!({"alg": "RS256"}), &claims()),
            issuer.sign(json!({"alg": "EdDSA", "kid": "b"}), &claims()),
            issuer.sign(json!({"alg": "EdDSA", "crit": ["x"]}), &claims()),
            issuer.sign(eddsa(), &with("iss", json!("https://other.example"))),
            issuer.sign(eddsa(), &with("aud", json!("other"))),
            issuer.sign(eddsa(), &with("exp", Value::Null)),
            issuer.sign(eddsa(), &with("atoll", json!({"clases": ["rt"]}))),
            good.rsplit_once('.').unwrap().0.to_string() + ".",
            format!("{good}A"),
            String::new(),
            ".".to_string(),
            "..".to_string(),
            "a".repeat(MAX_TOKEN + 1),
        ];
        // Claims of one token under the signature of another.
        let other = issuer.sign(eddsa(), &with("sub", json!("you")));
        let (signed, _) = other.rsplit_once('.').unwrap();
        tokens.push(format!("{signed}.{}", good.rsplit_once('.').unwrap().1));
        for token in tokens {
            assert_eq!(issuer.reason(&token, 700), Some(Reason::WrongToken), "{token}");
        }
        assert_eq!(issuer.reason(&good, 700), None);
    }
}
