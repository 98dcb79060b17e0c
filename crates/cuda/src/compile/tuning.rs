//! Which variant of a step was measured to be the fastest, kept per device, driver, precision and
//! text of the kernels: a variant whose kernel has changed since is not the one that was measured.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use model::gpu::{GpuPlan, GpuStep, Kernel};
use serde::{Deserialize, Serialize};

use super::cubin_cache::CacheKey;

/// Digits of the headers' digest in the name of a file.
const KERNELS_DIGITS: usize = 12;

/// The fastest variants by a step's signature.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// Signature to variants.
    pub choices: BTreeMap<String, TunedVariants>,
    /// Steps that must not start early, by the signatures of both steps: blocks that wait next to
    /// those of the previous step are placed where space is free, several on one SM, and stay
    /// there.
    #[serde(default)]
    pub apart: BTreeSet<String>,
}

/// Two consecutive steps.
pub(crate) fn pair(first: &GpuStep, second: &GpuStep) -> String {
    format!("{} > {}", first.signature, second.signature)
}

/// The variants of one signature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunedVariants {
    /// For real time.
    pub rt: TunedVariant,
    /// For best effort; never a cluster.
    pub be: TunedVariant,
}

/// A variant, and what it was when it was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunedVariant {
    /// Its name.
    pub variant: String,
    /// Stands for the text of the kernel that it launched.
    pub kernel: String,
}

/// Stands for the text of `kernel` in tuned results, without the headers that all kernels share.
pub(crate) fn kernel_text(kernel: &Kernel) -> String {
    format!("{:016x}", kernel.facts_hash())
}

impl Tuning {
    /// The content of `path`; empty when it is missing or not readable.
    pub(crate) fn read(path: &Path) -> Tuning {
        let Ok(text) = std::fs::read(path) else { return Tuning::default() };
        serde_json::from_slice(&text).unwrap_or_else(|err| {
            tracing::warn!(path = %path.display(), %err, "tuning file not readable");
            Tuning::default()
        })
    }

    /// Writes to `path`; a reader finds the old or the new content, never a part.
    pub(crate) fn write(&self, path: &Path) -> std::io::Result<()> {
        let unfinished = path.with_extension(format!("{}.part", std::process::id()));
        let mut file = std::fs::File::create(&unfinished)?;
        serde_json::to_writer_pretty(&mut file, self)?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        drop(file);
        std::fs::rename(&unfinished, path)
    }

    /// For each step of `plan`, whether it starts only when the previous one has ended.
    pub(crate) fn apart(&self, plan: &GpuPlan) -> Vec<bool> {
        if self.apart.is_empty() {
            let is_first = |index| index == 0;
            return (0..plan.steps.len()).map(is_first).collect();
        }
        let is_apart = |steps: &[GpuStep]| self.apart.contains(&pair(&steps[0], &steps[1]));
        let first = plan.steps.first().map(|_| true);
        first.into_iter().chain(plan.steps.windows(2).map(is_apart)).collect()
    }

    /// Adds `other`: its variants, and for all of `pairs` whether they are apart.
    pub(crate) fn extend(&mut self, other: Tuning, pairs: &BTreeSet<String>) {
        self.choices.extend(other.choices);
        self.apart.retain(|pair| !pairs.contains(pair));
        self.apart.extend(other.apart);
    }

    /// Whether a variant is tuned for a step of `plan`.
    pub(crate) fn knows_any(&self, plan: &GpuPlan) -> bool {
        plan.steps.iter().any(|step| self.choices.contains_key(&step.signature))
    }

    /// Whether a variant is tuned for `step` of `plan`. One that the plan does not have counts.
    pub(crate) fn is_tuned(&self, plan: &GpuPlan, step: &GpuStep) -> bool {
        let holds = |tuned: &TunedVariant| {
            named(step, tuned).is_none() || position(&plan.kernels, step, tuned).is_some()
        };
        self.choices.get(&step.signature).is_some_and(|chosen| holds(&chosen.rt))
    }

    /// Selects the tuned variants of `plan`. Unknown variants, and those whose kernels are others
    /// now, are ignored: the compiler has changed.
    pub(crate) fn apply(&self, plan: &mut GpuPlan) {
        for step in &mut plan.steps {
            let Some(chosen) = self.choices.get(&step.signature) else { continue };
            if let Some(index) = position(&plan.kernels, step, &chosen.rt) {
                step.rt = index;
            }
            if let Some(index) = position(&plan.kernels, step, &chosen.be)
                && step.choices[index].cluster <= 1
            {
                step.be = index;
            }
        }
    }
}

fn named(step: &GpuStep, tuned: &TunedVariant) -> Option<usize> {
    step.choices.iter().position(|launch| launch.variant == tuned.variant)
}

/// The variant of `step` that was measured, if it is the same still.
fn position(kernels: &[Kernel], step: &GpuStep, tuned: &TunedVariant) -> Option<usize> {
    let index = named(step, tuned)?;
    let kernel = kernels.get(step.choices[index].kernel)?;
    (kernel_text(kernel) == tuned.kernel).then_some(index)
}

/// The file of a device: name, driver, precision and the headers of the kernels determine whether a
/// measurement still holds.
pub(crate) fn file_name(
    gpu: &str,
    driver: i32,
    precision: &str,
    headers: &[(&str, &str)],
) -> PathBuf {
    let plain: String =
        gpu.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let parts = headers.iter().flat_map(|(name, body)| [name.as_bytes(), body.as_bytes()]);
    let kernels = CacheKey::of(parts).hex();
    let kernels = &kernels[..KERNELS_DIGITS];
    PathBuf::from(format!("tuning-{plain}-{driver}-{precision}-{kernels}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::layout::tests::{launch, step};
    use model::gpu::{KernelFacts, Launch};

    fn kernel(source: &str) -> Kernel {
        Kernel::new(KernelFacts {
            source: source.to_string(),
            expression: "Map".to_string(),
            threads: 32,
            shared_bytes: 0,
            args_bytes: 24,
        })
    }

    fn plan() -> GpuPlan {
        let named =
            |name: &str, cluster| Launch { variant: name.to_string(), cluster, ..launch(4, 0) };
        let mut one = step(named("a", 1));
        one.choices.push(named("b", 2));
        one.choices.push(named("c", 1));
        GpuPlan { steps: vec![one], kernels: vec![kernel("first")], ..GpuPlan::default() }
    }

    fn tuning(rt: &str, be: &str) -> Tuning {
        let tuned = |variant: &str| TunedVariant {
            variant: variant.to_string(),
            kernel: kernel_text(&kernel("first")),
        };
        let chosen = TunedVariants { rt: tuned(rt), be: tuned(be) };
        Tuning { choices: [("map".to_string(), chosen)].into(), apart: BTreeSet::new() }
    }

    #[test]
    fn selects_tuned_variants() {
        let mut plan = plan();
        tuning("b", "c").apply(&mut plan);
        assert_eq!((plan.steps[0].rt, plan.steps[0].be), (1, 2));
    }

    #[test]
    fn what_was_measured_with_another_kernel_is_not_used() {
        let mut plan = plan();
        let all = tuning("b", "c");
        assert!(all.is_tuned(&plan, &plan.steps[0]));
        plan.kernels = vec![kernel("changed")];
        all.apply(&mut plan);
        assert_eq!((plan.steps[0].rt, plan.steps[0].be), (0, 0));
        assert!(!all.is_tuned(&plan, &plan.steps[0]));
        plan.steps[0].choices.truncate(1);
        assert!(all.is_tuned(&plan, &plan.steps[0]), "a plan need not have all variants");
    }

    #[test]
    fn changed_headers_have_a_file_of_their_own() {
        let name = |body| file_name("GPU", 13_000, "f16", &[("norm.cuh", body), ("pool.cuh", "")]);
        assert_eq!(name("int a;"), name("int a;"));
        assert_ne!(name("int a;"), name("int b;"));
    }

    #[test]
    fn never_selects_clusters_for_best_effort_or_unknown_variants() {
        let mut plan = plan();
        tuning("gone", "b").apply(&mut plan);
        assert_eq!((plan.steps[0].rt, plan.steps[0].be), (0, 0));
    }

    #[test]
    fn steps_are_apart_by_the_signatures_of_both() {
        let mut plan = plan();
        let other = GpuStep { signature: "other".to_string(), ..plan.steps[0].clone() };
        plan.steps.extend([other, plan.steps[0].clone()]);
        let mut all = Tuning::default();
        assert_eq!(all.apart(&plan), [true, false, false]);
        let one = Tuning { apart: ["other > map".to_string()].into(), ..Tuning::default() };
        let both: BTreeSet<String> = ["map > other".to_string(), "other > map".to_string()].into();
        all.extend(one, &both);
        assert_eq!(all.apart(&plan), [true, false, true]);
        all.extend(Tuning::default(), &both);
        assert_eq!(all.apart(&plan), [true, false, false]);
        assert!(all.apart(&GpuPlan::default()).is_empty());
    }

    #[test]
    fn written_tuning_is_read_back() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join(file_name("NVIDIA H200", 13_000, "f16", &[]));
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        assert!(name.starts_with("tuning-NVIDIA-H200-13000-f16-"), "{name}");
        assert_eq!(Tuning::read(&path), Tuning::default());
        tuning("b", "c").write(&path).expect("a write");
        assert_eq!(Tuning::read(&path), tuning("b", "c"));
        std::fs::write(&path, "{").expect("a write");
        assert_eq!(Tuning::read(&path), Tuning::default());
    }
}
