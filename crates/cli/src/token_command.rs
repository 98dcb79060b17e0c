//! `atoll token`: creates, lists and revokes the tokens that clients of a server need.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use assembly::Failure;
use clap::{Args, Subcommand};
use server::auth::{GrantRecord, NewToken, Rate, Scope, TokenFile, TokenRecord};

use crate::data_folder::user_data_folder;
use crate::security_args::TOKENS;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll token create --data-dir /var/lib/atoll --scope infer --models 'resnet*' --rate 100/s
  atoll token create --scope infer --class rt,be --max-priority 2 --expires 30d --name camera
  atoll token create --scope metrics --name prometheus
  atoll token list
  atoll token revoke 9f86d081884c7d65

A server reads the file again when it changes. Once the file exists, a server that starts with it
refuses requests without a token; health stays open.")]
pub(crate) struct TokenArgs {
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Clone, Debug, Args)]
struct FileArgs {
    /// Data folder of the server; its file 'tokens' holds the tokens [default: atoll in the user's
    /// data folder]
    #[arg(long, env = "ATOLL_DATA_DIR")]
    data_dir: Option<PathBuf>,

    /// The file itself
    #[arg(long, env = "ATOLL_TOKENS", value_name = "FILE")]
    tokens: Option<PathBuf>,
}

impl FileArgs {
    fn file(&self) -> Result<TokenFile, Failure> {
        let folder = || self.data_dir.clone().or_else(user_data_folder);
        let path = self.tokens.clone().or_else(|| Some(folder()?.join(TOKENS)));
        let path = path.ok_or_else(|| Failure::usage("name a --data-dir or a --tokens FILE"))?;
        Ok(TokenFile::new(path))
    }
}

#[derive(Clone, Debug, Subcommand)]
enum TokenCommand {
    /// Create a token and print it; it cannot be shown again
    Create(CreateArgs),
    /// List tokens, without their secrets
    List {
        #[command(flatten)]
        file: FileArgs,

        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// Revoke a token
    Revoke {
        /// Its id
        id: String,

        #[command(flatten)]
        file: FileArgs,
    },
}

#[derive(Clone, Debug, Args)]
struct CreateArgs {
    #[command(flatten)]
    file: FileArgs,

    /// What it allows: infer, metrics, register, admin
    #[arg(long, value_delimiter = ',', required = true)]
    scope: Vec<Scope>,

    /// Models by name, '*' for any characters [default: all]
    #[arg(long, value_delimiter = ',', value_name = "PATTERN")]
    models: Vec<String>,

    /// Classes that its requests may have: rt, be
    #[arg(
        long = "class",
        value_delimiter = ',',
        default_value = "be",
        value_parser = ["rt", "be"]
    )]
    classes: Vec<String>,

    /// Highest priority that its requests may choose; 1 is the highest
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    max_priority: Option<u32>,

    /// Requests in a time, such as 100/s, 50/m or 1000/h
    #[arg(long)]
    rate: Option<Rate>,

    /// Requests at the same time
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Option<u32>,

    /// Time until it expires, such as 30d, 12h, 30m or 60s [default: never]
    #[arg(long, value_parser = lifetime)]
    expires: Option<u64>,

    /// What it is for, in words
    #[arg(long, default_value = "")]
    name: String,
}

fn lifetime(text: &str) -> Result<u64, String> {
    let wrong = || "a time such as 30d, 12h, 30m or 60s is expected".to_string();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds: u64 = match unit {
        'd' => 86_400,
        'h' => 3600,
        'm' => 60,
        's' => 1,
        _ => return Err(wrong()),
    };
    let number = text.strip_suffix(unit).and_then(|number| number.parse::<u64>().ok());
    number.and_then(|number| number.checked_mul(seconds)).ok_or_else(wrong)
}

/// Runs the command.
pub(crate) fn run(args: &TokenArgs) -> Result<(), Failure> {
    match &args.command {
        TokenCommand::Create(args) => create(args),
        TokenCommand::List { file, json } => {
            let tokens = file.file()?.list().map_err(Failure::failed)?;
            list(&tokens, *json)
        }
        TokenCommand::Revoke { id, file } => file.file()?.revoke(id).map_err(Failure::failed),
    }
}

fn create(args: &CreateArgs) -> Result<(), Failure> {
    let token = args.file.file()?.create(NewToken {
        name: args.name.clone(),
        grant: GrantRecord {
            scopes: args.scope.clone(),
            models: args.models.clone(),
            classes: args.classes.clone(),
            max_priority: args.max_priority,
            rate: args.rate,
            concurrency: args.concurrency,
        },
        lifetime: args.expires,
    });
    println!("{}", token.map_err(Failure::failed)?);
    Ok(())
}

fn list(tokens: &[TokenRecord], json: bool) -> Result<(), Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    if json {
        let shown: Vec<_> = tokens
            .iter()
            .map(|token| {
                serde_json::json!({
                    "id": token.id, "name": token.name, "state": token.state(now),
                    "grant": token.grant, "created": token.created, "expires": token.expires,
                })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&shown).map_err(Failure::failed)?);
        return Ok(());
    }
    for token in tokens {
        let scopes: Vec<&str> = token.grant.scopes.iter().map(|scope| scope.as_str()).collect();
        let models = match token.grant.models.is_empty() {
            true => "*".to_string(),
            false => token.grant.models.join(","),
        };
        println!(
            "{}  {:8} {:24} models {models}  class {}  {}",
            token.id,
            token.state(now),
            scopes.join(","),
            token.grant.classes.join(","),
            token.name
        );
    }
    Ok(())
}
