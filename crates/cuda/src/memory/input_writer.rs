//! Copies inputs to host memory and gives notice shortly before the end.

use bytes::Bytes;

/// Bytes still to be copied when a task is announced: about the time a preemption takes.
const NOTICE_BYTES: usize = 256 << 10;

/// Passes all bytes of `inputs` to `write`, with the input's index and their offset in it, and
/// calls `notify` shortly before the end.
pub(crate) fn write_inputs(
    inputs: &[&Bytes],
    mut write: impl FnMut(usize, usize, &[u8]),
    notify: &mut dyn FnMut(),
) {
    let mut left: usize = inputs.iter().map(|raw| raw.len()).sum();
    let mut notify = Some(notify);
    for (index, raw) in inputs.iter().enumerate() {
        let (first, last) = raw.split_at(left.saturating_sub(NOTICE_BYTES).min(raw.len()));
        write(index, 0, first);
        if left - first.len() <= NOTICE_BYTES
            && let Some(notify) = notify.take()
        {
            notify();
        }
        write(index, first.len(), last);
        left -= raw.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_all_inputs_and_notifies_once_near_the_end() {
        for lengths in [&[0][..], &[1000], &[NOTICE_BYTES + 7], &[600_000, 5, 0, 300_000]] {
            let mut random = base::Random::new(3);
            let mut bytes =
                |length: &usize| (0..*length).map(|_| random.below(256) as u8).collect();
            let inputs: Vec<Bytes> = lengths.iter().map(&mut bytes).map(Vec::<u8>::into).collect();
            let written = std::cell::RefCell::new(vec![Vec::new(); inputs.len()]);
            let mut announced = Vec::new();
            write_inputs(
                &inputs.iter().collect::<Vec<_>>(),
                |index, at, part| {
                    let mut written = written.borrow_mut();
                    assert_eq!(written[index].len(), at);
                    written[index].extend_from_slice(part);
                },
                &mut || announced.push(written.borrow().iter().map(Vec::len).sum::<usize>()),
            );
            assert_eq!(written.into_inner(), inputs);
            let all: usize = lengths.iter().sum();
            assert_eq!(announced, [all.saturating_sub(NOTICE_BYTES)]);
        }
    }
}
