//! Links the binary with identical code folded and without symbols.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // On this target rustc links with LLD, which can fold identical functions: generic code of
    // different types that became the same instructions. Other linkers may not know the option.
    let target = std::env::var("TARGET").unwrap_or_default();
    if target == "x86_64-unknown-linux-gnu" {
        println!("cargo:rustc-link-arg-bins=-Wl,--icf=all");
        // Cargo does not strip a binary whose package has an optimisation of its own.
        println!("cargo:rustc-link-arg-bins=-Wl,--strip-all");
    }
}
