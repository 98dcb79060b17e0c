//! How a command fails: a message for people and an exit code for scripts.

/// The reason why a command failed.
#[derive(Debug)]
pub struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    /// The command was tried and did not work: exit code 1.
    pub fn failed(message: impl ToString) -> Failure {
        Failure { message: message.to_string(), code: 1 }
    }

    /// The arguments make no sense here: exit code 2, as for an unknown flag.
    pub fn usage(message: impl ToString) -> Failure {
        Failure { message: message.to_string(), code: 2 }
    }

    /// Another exit code, such as 130 after Ctrl-C.
    pub fn with_code(message: impl ToString, code: u8) -> Failure {
        Failure { message: message.to_string(), code }
    }

    /// The same with another message.
    pub fn renamed(&self, message: impl ToString) -> Failure {
        Failure::with_code(message, self.code)
    }

    /// What went wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Prints the message to standard error and returns the exit code.
    pub fn report(&self) -> u8 {
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
