//! How to reach the Kubernetes API: the pod's service account, or a kubeconfig file.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::Url;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::yaml;

/// Where Kubernetes mounts a pod's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Namespace where the configuration names none.
const NAMESPACE: &str = "default";

/// Address of an API server and the credentials for it. It has no `Debug` form: it holds secrets.
pub struct ClientConfig {
    pub(super) server: Url,
    /// PEM certificates that the server's certificate is checked against; `None` for those that
    /// the system trusts.
    pub(super) roots: Option<Vec<u8>>,
    /// Whether the server's certificate is not checked at all.
    pub(super) insecure: bool,
    /// PEM certificate and key of the client.
    pub(super) identity: Option<Vec<u8>>,
    pub(super) token: BearerToken,
    /// The namespace that the configuration names.
    pub(super) namespace: String,
}

/// The token that authenticates requests.
pub(super) enum BearerToken {
    None,
    Fixed(String),
    /// Read before every request: Kubernetes replaces it before it expires.
    File(PathBuf),
}

impl ClientConfig {
    /// The pod's service account; outside of a pod, the files that `KUBECONFIG` lists, or
    /// `~/.kube/config`.
    pub fn infer() -> Result<ClientConfig, String> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let host = variable("KUBERNETES_SERVICE_HOST");
        let port = variable("KUBERNETES_SERVICE_PORT");
        let in_cluster = match (host, port) {
            (Some(host), Some(port)) => {
                ClientConfig::in_cluster(&host, &port, Path::new(SERVICE_ACCOUNT))
            }
            _ => Err("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set".to_string()),
        };
        let in_cluster = match in_cluster {
            Ok(config) => return Ok(config),
            Err(error) => error,
        };
        let files: Vec<PathBuf> = match std::env::var_os("KUBECONFIG").filter(|v| !v.is_empty()) {
            Some(list) => std::env::split_paths(&list).collect(),
            None => {
                std::env::home_dir().map(|home| home.join(".kube/config")).into_iter().collect()
            }
        };
        ClientConfig::from_files(&files).map_err(|error| {
            format!(
                "no access to the Kubernetes API: no service account ({in_cluster}) and no usable \
                 kubeconfig ({error}); set automountServiceAccountToken, or KUBECONFIG"
            )
        })
    }

    /// The service account in `folder`.
    pub fn in_cluster(host: &str, port: &str, folder: &Path) -> Result<ClientConfig, String> {
        let host = match host.contains(':') && !host.starts_with('[') {
            true => format!("[{host}]"),
            false => host.to_string(),
        };
        let token = folder.join("token");
        // Fails here rather than with the first request.
        read(&token)?;
        let namespace = read(&folder.join("namespace"))?;
        Ok(ClientConfig {
            server: server_url(&format!("https://{host}:{port}"))?,
            roots: Some(read(&folder.join("ca.crt"))?),
            insecure: false,
            identity: None,
            token: BearerToken::File(token),
            namespace: String::from_utf8_lossy(&namespace).trim().to_string(),
        })
    }

    /// A kubeconfig in YAML or JSON. Files that it names are relative to the working directory.
    pub fn from_kubeconfig(text: &str) -> Result<ClientConfig, String> {
        Kubeconfig::parse(text, Path::new(""))?.resolve()
    }

    /// Kubeconfig files; of entries of the same name the first one counts, as with kubectl.
    fn from_files(files: &[PathBuf]) -> Result<ClientConfig, String> {
        let mut merged = Kubeconfig::default();
        let mut missing = Vec::new();
        for file in files {
            match std::fs::read_to_string(file) {
                Ok(text) => {
                    let folder = file.parent().unwrap_or(Path::new(""));
                    let config = Kubeconfig::parse(&text, folder);
                    merged.merge(config.map_err(|error| format!("{}: {error}", file.display()))?);
                }
                Err(error) => missing.push(format!("{}: {error}", file.display())),
            }
        }
        match missing.len() == files.len() {
            true if files.is_empty() => Err("there is no home directory".to_string()),
            true => Err(missing.join(", ")),
            false => merged.resolve(),
        }
    }
}

fn server_url(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("server {text}: {error}"))?;
    match matches!(url.scheme(), "http" | "https") && !url.cannot_be_a_base() {
        true => Ok(url),
        false => Err(format!("server {text}: expected an http or https address")),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// A kubeconfig file, as far as it is used.
#[derive(Default)]
struct Kubeconfig {
    current_context: Option<String>,
    clusters: Vec<NamedEntry>,
    users: Vec<NamedEntry>,
    contexts: Vec<NamedEntry>,
}

/// A cluster, user or context with its name and the folder of its file.
struct NamedEntry {
    name: String,
    body: Value,
    folder: PathBuf,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct ContextEntry {
    cluster: String,
    user: Option<String>,
    namespace: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct ClusterEntry {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: Option<bool>,
    tls_server_name: Option<Value>,
    proxy_url: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct UserEntry {
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    exec: Option<Value>,
    auth_provider: Option<Value>,
    username: Option<Value>,
    password: Option<Value>,
    #[serde(rename = "as")]
    impersonate: Option<Value>,
}

impl Kubeconfig {
    fn parse(text: &str, folder: &Path) -> Result<Kubeconfig, String> {
        let mut document = yaml::parse(text).map_err(|error| {
            format!("{error} ('kubectl config view --raw -o json' writes a simpler form)")
        })?;
        let mut entries = |list: &str, kind: &str| -> Result<Vec<NamedEntry>, String> {
            let items = match document.get_mut(list).map(Value::take) {
                None | Some(Value::Null) => Vec::new(),
                Some(Value::Array(items)) => items,
                Some(_) => return Err(format!("'{list}' is not a list")),
            };
            let entry = |mut item: Value| {
                let name = item["name"].as_str().map(str::to_string);
                let name = name.ok_or_else(|| format!("an entry of '{list}' has no name"))?;
                let body = item.get_mut(kind).map(Value::take).unwrap_or_default();
                Ok(NamedEntry { name, body, folder: folder.to_path_buf() })
            };
            items.into_iter().filter(Value::is_object).map(entry).collect()
        };
        let (clusters, users) = (entries("clusters", "cluster")?, entries("users", "user")?);
        let contexts = entries("contexts", "context")?;
        let current = document.get("current-context").and_then(Value::as_str);
        let current_context = current.filter(|name| !name.is_empty()).map(str::to_string);
        Ok(Kubeconfig { current_context, clusters, users, contexts })
    }

    fn merge(&mut self, later: Kubeconfig) {
        self.current_context = self.current_context.take().or(later.current_context);
        self.clusters.extend(later.clusters);
        self.users.extend(later.users);
        self.contexts.extend(later.contexts);
    }

    /// The configuration of the current context.
    fn resolve(self) -> Result<ClientConfig, String> {
        let current = self.current_context.ok_or("it has no current-context")?;
        let (context, _) = entry::<ContextEntry>(&self.contexts, "context", &current)?;
        let (cluster, folder) = entry::<ClusterEntry>(&self.clusters, "cluster", &context.cluster)?;
        for (field, value) in
            [("tls-server-name", &cluster.tls_server_name), ("proxy-url", &cluster.proxy_url)]
        {
            if value.is_some() {
                return Err(format!("cluster '{}': {field} is not supported", context.cluster));
            }
        }
        let roots = content(
            cluster.certificate_authority_data.as_deref(),
            cluster.certificate_authority.as_deref(),
            folder,
        )?;
        let (token, identity) = match &context.user {
            None => (BearerToken::None, None),
            Some(name) => {
                let (user, folder) = entry::<UserEntry>(&self.users, "user", name)?;
                user.credentials(folder).map_err(|error| format!("user '{name}': {error}"))?
            }
        };
        Ok(ClientConfig {
            server: server_url(&cluster.server)?,
            roots,
            insecure: cluster.insecure_skip_tls_verify.unwrap_or(false),
            identity,
            token,
            namespace: context.namespace.unwrap_or_else(|| NAMESPACE.to_string()),
        })
    }
}

/// The body of the entry of this name, and the folder of its file.
fn entry<'a, T: DeserializeOwned + Default>(
    entries: &'a [NamedEntry],
    kind: &str,
    name: &str,
) -> Result<(T, &'a Path), String> {
    let found = entries.iter().find(|entry| entry.name == name);
    let found = found.ok_or_else(|| format!("it has no {kind} '{name}'"))?;
    if found.body.is_null() {
        return Ok((T::default(), &found.folder));
    }
    let body = T::deserialize(&found.body);
    Ok((body.map_err(|error| format!("{kind} '{name}': {error}"))?, &found.folder))
}

impl UserEntry {
    fn credentials(self, folder: &Path) -> Result<(BearerToken, Option<Vec<u8>>), String> {
        let unsupported = [
            ("exec", &self.exec),
            ("auth-provider", &self.auth_provider),
            ("username", &self.username),
            ("password", &self.password),
            ("as", &self.impersonate),
        ];
        if let Some((field, _)) = unsupported.iter().find(|(_, value)| value.is_some()) {
            return Err(format!(
                "'{field}' is not supported; use a token or a client certificate, or run inside \
                 the cluster with a service account"
            ));
        }
        let certificate = content(
            self.client_certificate_data.as_deref(),
            self.client_certificate.as_deref(),
            folder,
        )?;
        let key = content(self.client_key_data.as_deref(), self.client_key.as_deref(), folder)?;
        let identity = match (certificate, key) {
            (Some(certificate), Some(key)) => Some([certificate, key].join(&b'\n')),
            (None, None) => None,
            _ => return Err("a client certificate and its key come together".to_string()),
        };
        let token = match (self.token_file, self.token.filter(|token| !token.is_empty())) {
            (Some(file), _) => BearerToken::File(folder.join(file)),
            (None, Some(token)) => BearerToken::Fixed(token),
            (None, None) => BearerToken::None,
        };
        Ok((token, identity))
    }
}

/// Bytes that are given as base64, or else as a file.
fn content(
    data: Option<&str>,
    file: Option<&Path>,
    folder: &Path,
) -> Result<Option<Vec<u8>>, String> {
    match (data.filter(|data| !data.is_empty()), file) {
        (Some(data), _) => {
            let data: String = data.split_whitespace().collect();
            STANDARD.decode(data).map(Some).map_err(|error| format!("invalid base64: {error}"))
        }
        (None, Some(file)) => read(&folder.join(file)).map(Some),
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(config: Result<ClientConfig, String>) -> String {
        config.err().expect("an error")
    }

    fn fixed(config: &ClientConfig) -> &str {
        match &config.token {
            BearerToken::Fixed(token) => token,
            _ => panic!("not a fixed token"),
        }
    }

    const TWO_USERS: &str = "
apiVersion: v1
current-context: one
clusters:
- name: c
  cluster:
    server: https://10.0.0.1:6443/k8s/clusters/c-1
    certificate-authority-data: Q0VSVElGSUNBVEU=
contexts:
- {name: one, context: {cluster: c, user: one, namespace: sea}}
- name: two
  context:
    cluster: c
    user: two
users:
- name: one
  user: {token: secret}
- name: two
  user:
    exec:
      command: aws
      args:
      - eks
      - get-token
";

    #[test]
    fn kubeconfig_gives_server_roots_token_and_namespace() {
        let config = ClientConfig::from_kubeconfig(TWO_USERS).unwrap();
        assert_eq!(config.server.as_str(), "https://10.0.0.1:6443/k8s/clusters/c-1");
        assert_eq!(config.roots.as_deref(), Some(&b"CERTIFICATE"[..]));
        assert_eq!((fixed(&config), config.namespace.as_str()), ("secret", "sea"));
        assert!(config.identity.is_none() && !config.insecure);
    }

    #[test]
    fn authentication_plugins_are_refused_by_name() {
        let text = TWO_USERS.replace("current-context: one", "current-context: two");
        let error = error(ClientConfig::from_kubeconfig(&text));
        assert!(error.contains("user 'two'") && error.contains("'exec' is not supported"));
    }

    #[test]
    fn incomplete_kubeconfigs_are_refused() {
        let cases = [
            ("current-context: one", "current-context: three", "no context 'three'"),
            ("current-context: one", "other: one", "no current-context"),
            ("user: one", "user: nobody", "no user 'nobody'"),
            ("https://", "tcp://", "http or https"),
            ("Q0VSVElGSUNBVEU=", "CERT!", "base64"),
            ("token: secret", "client-certificate-data: Q0VSVA==", "come together"),
            ("token: secret", "client-certificate: /nonexistent/c", "/nonexistent/c"),
            ("server:", "tls-server-name: x\n    server:", "tls-server-name"),
        ];
        for (from, to, message) in cases {
            let error = error(ClientConfig::from_kubeconfig(&TWO_USERS.replacen(from, to, 1)));
            assert!(error.contains(message), "{to}: {error}");
        }
    }

    #[test]
    fn first_of_several_kubeconfigs_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("token"), "from-file").unwrap();
        let first = "users: [{name: one, user: {tokenFile: token}}]\n";
        std::fs::write(path("first"), first).unwrap();
        std::fs::write(path("second"), TWO_USERS).unwrap();
        let files = [path("missing"), path("first"), path("second")];
        let config = ClientConfig::from_files(&files).unwrap();
        assert!(matches!(&config.token, BearerToken::File(file) if *file == path("token")));
        assert_eq!(config.namespace, "sea");
        assert!(error(ClientConfig::from_files(&files[..1])).contains("missing"));
    }

    #[test]
    fn service_account_gives_token_roots_and_namespace() {
        let folder = tempfile::tempdir().unwrap();
        let open = |host: &str| ClientConfig::in_cluster(host, "443", folder.path());
        assert!(error(open("10.0.0.1")).contains("token"));
        for (name, text) in [("token", "t"), ("ca.crt", "c"), ("namespace", "sea\n")] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let config = open("fd00::1").unwrap();
        assert_eq!(config.server.as_str(), "https://[fd00::1]/");
        assert_eq!(config.roots.as_deref(), Some(&b"c"[..]));
        assert_eq!(config.namespace, "sea");
    }
}
