//! Frames of the live stream: length, kind, three zeros, content.

/// Bytes before the content.
const HEAD: usize = 8;
/// Maximum length of a frame.
const MAX_FRAME: usize = 16 << 20;
/// The kind of figures.
const FIGURES: u8 = b'J';

/// Splits a stream into frames.
#[derive(Debug, Default)]
pub(super) struct FrameReader {
    rest: Vec<u8>,
}

impl FrameReader {
    pub(super) fn push(&mut self, chunk: &[u8]) {
        self.rest.extend_from_slice(chunk);
    }

    /// The content of the next complete frame of figures; other kinds are skipped.
    pub(super) fn next_figures(&mut self) -> Result<Option<Vec<u8>>, String> {
        loop {
            let Some(head) = self.rest.first_chunk::<HEAD>() else { return Ok(None) };
            let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
            let kind = head[4];
            if length > MAX_FRAME {
                return Err(format!("the server sent a frame of {length} bytes"));
            }
            if self.rest.len() < HEAD + length {
                return Ok(None);
            }
            let content = self.rest[HEAD..HEAD + length].to_vec();
            self.rest.drain(..HEAD + length);
            if kind == FIGURES {
                return Ok(Some(content));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, content: &[u8]) -> Vec<u8> {
        let mut bytes = (content.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&[kind, 0, 0, 0]);
        bytes.extend_from_slice(content);
        bytes
    }

    #[test]
    fn figures_are_found_however_the_stream_is_cut() {
        let stream = [frame(b'S', &[1; 20]), frame(b'J', b"{}"), frame(b'J', b"[1]")].concat();
        for size in 1..stream.len() {
            let (mut reader, mut found) = (FrameReader::default(), Vec::new());
            for chunk in stream.chunks(size) {
                reader.push(chunk);
                while let Some(content) = reader.next_figures().unwrap() {
                    found.push(content);
                }
            }
            assert_eq!(found, [b"{}".to_vec(), b"[1]".to_vec()], "chunks of {size}");
        }
    }

    #[test]
    fn an_absurd_length_is_an_error() {
        let mut reader = FrameReader::default();
        reader.push(&[0xff; 8]);
        assert!(reader.next_figures().unwrap_err().contains("4294967295"));
    }
}
