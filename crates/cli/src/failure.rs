//! How a command fails: a message for people and an exit code for scripts.

/// The end of a command that did not do what it was asked to.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    /// What was asked for was tried and did not work: exit code 1.
    pub(crate) fn failed(message: impl ToString) -> Failure {
        Failure { message: message.to_string(), code: 1 }
    }

    /// What was asked for makes no sense here: exit code 2, as for an unknown flag.
    pub(crate) fn usage(message: impl ToString) -> Failure {
        Failure { message: message.to_string(), code: 2 }
    }

    /// What went wrong.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Prints the message and gives the exit code.
    pub(crate) fn report(&self) -> u8 {
        if !self.message.is_empty() {
            eprintln!("error: {}", self.message);
        }
        self.code
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Failure {
        Failure::failed(message)
    }
}
