//! The cryptography provider of TLS.

/// Installs it for this process. A provider that is installed already stays.
pub(crate) fn choose() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}
