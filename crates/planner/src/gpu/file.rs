//! GPU kinds of the user's own, in TOML.

use serde::Deserialize;
use toml::Spanned;

use super::table::{EIGHTHS, parts};
use super::{Division, GPU_KINDS, GpuKind, KINDS_MAX, SLOTS_MAX, SliceKind};
use crate::error::PlanError;
use crate::toml_file::{in_range, name, read, wrong};

/// Most kinds of a file.
const FILE_KINDS_MAX: usize = 64;
/// Memory of a slice in GiB.
const MEMORY_GIB: (f64, f64) = (0.001, 1024.0 * 1024.0);
const SMS_MAX: u16 = 4096;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GpusFile {
    #[serde(default)]
    gpu: Vec<Spanned<GpuEntry>>,
}

/// A GPU with MIG has slices; one without has SMs and memory.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuEntry {
    name: Spanned<String>,
    #[serde(default)]
    device_words: Vec<Spanned<String>>,
    gpcs: Option<Spanned<u8>>,
    memory_slices: Option<Spanned<u8>>,
    #[serde(default)]
    slice: Vec<Spanned<SliceEntry>>,
    sms: Option<Spanned<u16>>,
    memory_gib: Option<Spanned<f64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SliceEntry {
    name: Spanned<String>,
    profile_id: u8,
    gpcs: Spanned<u8>,
    memory_gib: Spanned<f64>,
    memory_slices: Spanned<u8>,
    starts: Spanned<Vec<u8>>,
}

/// The kinds of a file: `[[gpu]]` tables with `name`, `gpcs`, `memory_slices` and `[[gpu.slice]]`
/// tables of `name`, `profile_id`, `gpcs`, `memory_gib`, `memory_slices` and `starts`; or, for a
/// GPU without MIG, `name`, `sms` and `memory_gib`.
///
/// Kinds live as long as the process; a file has few.
pub fn from_toml(text: &str) -> Result<Vec<&'static GpuKind>, PlanError> {
    let file: GpusFile = read(text)?;
    let mut kinds: Vec<&'static GpuKind> = Vec::new();
    for entry in &file.gpu {
        let kind = kind_of(text, entry)?;
        let known = GPU_KINDS.iter().chain(kinds.iter().copied());
        if known.into_iter().any(|other| other.name.eq_ignore_ascii_case(kind.name)) {
            let what = format!("gpu '{}' is known already", kind.name);
            return Err(wrong(text, &entry.get_ref().name, what));
        }
        if kinds.len() == FILE_KINDS_MAX {
            return Err(wrong(text, entry, format!("more than {FILE_KINDS_MAX} gpus")));
        }
        kinds.push(Box::leak(Box::new(kind)));
    }
    Ok(kinds)
}

impl GpuKind {
    /// The table of a kind that [`from_toml`] has read; `None` for a kind that is known anyway.
    pub(crate) fn own_table(&self) -> Option<String> {
        let known = GPU_KINDS.iter().any(|kind| kind.name == self.name);
        (!known).then(|| to_toml(self))
    }
}

fn to_toml(kind: &GpuKind) -> String {
    // A string of JSON without control characters is one of TOML.
    let text = |name: &str| serde_json::Value::from(name).to_string();
    let gib = |mib: u64| mib as f64 / 1024.0;
    let words: Vec<String> = kind.words.iter().map(|word| text(word)).collect();
    let mut table =
        format!("[[gpu]]\nname = {}\ndevice_words = [{}]\n", text(kind.name), words.join(", "));
    if let Division::Sms { sms } = kind.division {
        return table + &format!("sms = {sms}\nmemory_gib = {:?}\n", gib(kind.memory_mib()));
    }
    table += &format!("gpcs = {}\nmemory_slices = {}\n", kind.gpcs, kind.memory_slices);
    for slice in kind.slices {
        table += &format!(
            "[[gpu.slice]]\nname = {}\nprofile_id = {}\ngpcs = {}\nmemory_gib = {:?}\n\
             memory_slices = {}\nstarts = {:?}\n",
            text(slice.name),
            slice.profile_id,
            slice.gpcs,
            gib(slice.memory_mib()),
            slice.memory_slices,
            slice.starts
        );
    }
    table
}

fn leak(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

fn kind_of(text: &str, entry: &Spanned<GpuEntry>) -> Result<GpuKind, PlanError> {
    let file = entry.get_ref();
    let own = name(text, "name", &file.name)?;
    let words = file
        .device_words
        .iter()
        .map(|word| name(text, "device_words", word).map(|word| leak(word.to_ascii_lowercase())));
    let words: Vec<&'static str> = words.collect::<Result<_, _>>()?;
    let (division, gpcs, memory_slices, slices) = match (&file.sms, &file.memory_gib) {
        (Some(sms), Some(memory)) if file.slice.is_empty() => by_sms(text, sms, memory)?,
        (None, None) => by_slices(text, entry)?,
        _ => {
            let what = format!(
                "gpu '{own}': either sms and memory_gib, or gpcs, memory_slices and [[gpu.slice]]"
            );
            return Err(wrong(text, entry, what));
        }
    };
    let (words, slices) = (Box::leak(words.into_boxed_slice()), Box::leak(slices));
    Ok(GpuKind { name: leak(own), words, division, gpcs, memory_slices, slices })
}

type Geometry = (Division, u8, u8, Box<[SliceKind]>);

fn by_sms(text: &str, sms: &Spanned<u16>, memory: &Spanned<f64>) -> Result<Geometry, PlanError> {
    let count = *sms.get_ref();
    if !(u16::from(EIGHTHS)..=SMS_MAX).contains(&count) {
        let what = format!("sms {count} is not from {EIGHTHS} to {SMS_MAX}");
        return Err(wrong(text, sms, what));
    }
    let memory_mib = mib(in_range(text, "memory_gib", memory, MEMORY_GIB)?);
    let slices = Box::new(parts(memory_mib));
    Ok((Division::Sms { sms: count }, EIGHTHS, EIGHTHS, slices))
}

fn by_slices(text: &str, entry: &Spanned<GpuEntry>) -> Result<Geometry, PlanError> {
    let file = entry.get_ref();
    let slots = |field: &str, value: &Option<Spanned<u8>>| match value {
        Some(value) if (1..=SLOTS_MAX).contains(value.get_ref()) => Ok(*value.get_ref()),
        Some(value) => {
            let what = format!("{field} {} is not from 1 to {SLOTS_MAX}", value.get_ref());
            Err(wrong(text, value, what))
        }
        None => Err(wrong(text, entry, format!("{field} is missing"))),
    };
    let gpcs = slots("gpcs", &file.gpcs)?;
    let memory_slices = slots("memory_slices", &file.memory_slices)?;
    if file.slice.is_empty() || file.slice.len() > KINDS_MAX {
        let what = format!("{} [[gpu.slice]] tables, not 1 to {KINDS_MAX}", file.slice.len());
        return Err(wrong(text, entry, what));
    }
    let mut slices: Vec<SliceKind> = Vec::new();
    for one in &file.slice {
        let slice = slice_of(text, one.get_ref(), gpcs, memory_slices)?;
        let twice = |other: &SliceKind| {
            other.name == slice.name
                || other.profile_id == slice.profile_id
                || (other.gpcs, other.memory_slices) == (slice.gpcs, slice.memory_slices)
        };
        if let Some(other) = slices.iter().find(|other| twice(other)) {
            let what =
                format!("slice '{}': name, profile_id or size of '{}'", slice.name, other.name);
            return Err(wrong(text, one, what));
        }
        slices.push(slice);
    }
    slices.sort_by_key(|slice| (slice.gpcs, slice.memory_slices));
    Ok((Division::Mig, gpcs, memory_slices, slices.into_boxed_slice()))
}

fn slice_of(
    text: &str,
    file: &SliceEntry,
    gpcs: u8,
    memory_slices: u8,
) -> Result<SliceKind, PlanError> {
    let own = name(text, "slice: name", &file.name)?;
    for (field, value, max) in
        [("gpcs", &file.gpcs, gpcs), ("memory_slices", &file.memory_slices, memory_slices)]
    {
        if !(1..=max).contains(value.get_ref()) {
            let what = format!("slice '{own}': {field} {} is not from 1 to {max}", value.get_ref());
            return Err(wrong(text, value, what));
        }
    }
    let (size, starts) = (*file.memory_slices.get_ref(), file.starts.get_ref());
    let rising = starts.windows(2).all(|pair| pair[0] < pair[1]);
    if starts.is_empty() || !rising || starts.iter().any(|start| *start > memory_slices - size) {
        let last = memory_slices - size;
        let what = format!("slice '{own}': starts {starts:?} do not rise from 0 to {last} at most");
        return Err(wrong(text, &file.starts, what));
    }
    let memory_gib =
        in_range(text, &format!("slice '{own}': memory_gib"), &file.memory_gib, MEMORY_GIB)?;
    Ok(SliceKind {
        name: leak(own),
        profile_id: file.profile_id,
        gpcs: *file.gpcs.get_ref(),
        memory_mib: mib(memory_gib),
        memory_slices: size,
        starts: Box::leak(starts.clone().into_boxed_slice()),
    })
}

fn mib(gib: f64) -> u32 {
    (gib * 1024.0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const B300: &str = "[[gpu]]\nname = 'b300-288gb'\ndevice_words = ['B300']\ngpcs = 7\n\
        memory_slices = 8\n[[gpu.slice]]\nname = '7g.269gb'\nprofile_id = 0\ngpcs = 7\n\
        memory_gib = 268.0\nmemory_slices = 8\nstarts = [0]\n[[gpu.slice]]\nname = '1g.34gb'\n\
        profile_id = 19\ngpcs = 1\nmemory_gib = 31.5\nmemory_slices = 1\nstarts = [0, 1, 6]\n";

    #[test]
    fn own_kinds_are_read_with_and_without_mig() {
        let sms = "[[gpu]]\nname = 'l20-48gb'\nsms = 92\nmemory_gib = 44.0\n";
        let kinds = from_toml(&format!("{B300}{sms}")).unwrap();
        assert_eq!((kinds[0].slices[0].name, kinds[0].slices[0].memory_mib()), ("1g.34gb", 32_256));
        assert!(kinds[0].is_named("NVIDIA B300 SXM6 AC"));
        assert_eq!(kinds[0].maximal_patterns().len(), 2);
        assert_eq!(kinds[1].division, Division::Sms { sms: 92 });
        assert_eq!(kinds[1].slices[1].memory_mib(), 11 * 1024);
        // Plan files carry the table of their kind.
        for kind in kinds {
            let copy = from_toml(&kind.own_table().unwrap()).unwrap();
            assert_eq!(format!("{:?}", copy[0]), format!("{kind:?}"));
        }
        assert!(GPU_KINDS.iter().all(|kind| kind.own_table().is_none()));
    }

    #[test]
    fn bad_tables_are_named_with_their_line() {
        for (bad, line, what) in [
            (B300.replace("gpcs = 7\nmemory", "gpcs = 9\nmemory"), 4, "gpcs 9"),
            (B300.replace("memory_slices = 8\n[", "memory_slices = 0\n["), 5, "memory_slices 0"),
            (B300.replace("gib = 31.5", "gib = nan"), 17, "'1g.34gb': memory_gib NaN"),
            (B300.replace("[0, 1, 6]", "[0, 8]"), 19, "'1g.34gb': starts"),
            (B300.replace("[0, 1, 6]", "[]"), 19, "'1g.34gb': starts"),
            (B300.replace("profile_id = 19", "profile_id = 0"), 13, "'1g.34gb': name"),
            (B300.replace("gpcs = 1\n", "gpcs = 1\nsms = 3\n"), 17, "sms"),
            (B300.replace("'b300-288gb'", "'A100-80gb'"), 2, "known already"),
            (format!("{B300}[[gpu]]\nname = 'x'\nsms = 3\nmemory_gib = 4.0\n"), 22, "sms 3"),
            (format!("{B300}[[gpu]]\nname = 'x'\n"), 20, "gpcs is missing"),
        ] {
            let error = from_toml(&bad).unwrap_err().to_string();
            assert!(error.contains(&format!("line {line}:")) && error.contains(what), "{error}");
        }
    }
}
