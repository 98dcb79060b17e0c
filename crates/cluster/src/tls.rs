//! Which cryptography TLS uses.

/// Chooses it for this process. What another part of the process has chosen before stays: any is good.
pub(crate) fn choose() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}
